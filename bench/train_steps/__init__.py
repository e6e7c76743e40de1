"""Times train steps alone, divides their time by kind of kernel, and times the same step in plain torch."""
