"""Records and shows the progress of a run: metrics, live display, timeline, Prometheus endpoint and pages."""
