"""Weight benchmarks: a version of the weights from a trainer to engines, by every transport."""
