"""vLLM's part in log-probs that equal the trainer's bit for bit (`run.bitwise`)."""
