"""The state of a pool of GPUs and the plans that change it: pure, without a clock or a process."""
