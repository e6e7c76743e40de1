"""The watchdog notices a run that makes no progress, reports where it hangs, and ends it with all its processes."""
