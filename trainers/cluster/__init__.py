"""Places, starts, calls and replaces the processes of a run."""
