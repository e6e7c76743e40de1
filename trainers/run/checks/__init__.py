"""Checks of a run before it starts: the dry run, the doctor, extras, GPUs and the trust in recorded log-probs."""
