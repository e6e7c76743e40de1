"""Train backends, one file each."""
