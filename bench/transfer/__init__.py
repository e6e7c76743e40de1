"""`headrace bench transfer`: every store against every baseline, on the same rows."""
