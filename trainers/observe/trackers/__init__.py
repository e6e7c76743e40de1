"""Trackers get the metrics and samples of a run: Weights & Biases, trackio, MLflow and TensorBoard."""
