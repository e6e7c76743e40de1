"""The GRPO algorithm: its steps, the modes that run them, and the state that is kept between steps."""
