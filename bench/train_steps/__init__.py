"""Times train steps alone, with every kernel accounted for, beside the same step in plain torch."""
