"""Train backends load a model, train it on microbatches over the ranks of a mesh, and stream its weights."""
