"""Code about an actor's process and host: memory, GPUs, remote methods, and threads and processes for users' code."""
