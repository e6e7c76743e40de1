"""Times train steps alone, with every kernel accounted for, and the same step in plain torch for comparison."""
