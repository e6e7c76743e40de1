"""Weight benchmarks measure the time that each transport takes to send a version of the weights to engines."""
