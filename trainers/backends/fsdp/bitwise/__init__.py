"""Log-probs that equal those of the rollout engine bit for bit (`run.bitwise`)."""
