"""The GRPO algorithm: its steps, the controllers that run them in order, and the state that is kept between steps."""
