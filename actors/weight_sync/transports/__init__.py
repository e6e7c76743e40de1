"""Weight transports: one sender and one receiver for each way to carry weights from a trainer to engines."""
