"""Implements the clients of the data plane: the blocking one, the one for asyncio, and what they share."""
