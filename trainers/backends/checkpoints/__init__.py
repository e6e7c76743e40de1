"""Reads, writes and schedules the sharded checkpoints of train backends."""
