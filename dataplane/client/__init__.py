"""Holds the client's side of the data plane: the operations, blocking and as coroutines, and what they share."""
