"""How a client reaches the directory from another process."""
