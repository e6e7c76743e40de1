"""The watchdog: notices a run that stands still, says where, and ends it with all its processes."""
