"""What an actor needs of its own process and host: memory, GPUs, remote methods, and processes and threads of users."""
