"""An actor's own process and host: memory, GPUs, remote methods, and threads and processes for users' code."""
