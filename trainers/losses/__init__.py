"""Policy losses: each term returns a sum over its microbatch and declares the denominator of the step's mean."""
