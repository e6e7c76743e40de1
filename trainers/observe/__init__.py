"""What a run shows: metrics, progress, timeline, plots and report."""
