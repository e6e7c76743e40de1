"""Shows what a run does: metrics, live progress, timeline, Prometheus endpoint, plots and report."""
