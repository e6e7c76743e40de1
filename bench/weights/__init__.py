"""Weight benchmarks measure how long a version of the weights takes from a trainer to engines, by every transport."""
