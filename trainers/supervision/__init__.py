"""Watches a run: the watchdog detects a run without progress, reports where it hangs, and ends all its processes."""
