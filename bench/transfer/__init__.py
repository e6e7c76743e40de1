"""`headrace bench transfer` moves the same rows through every store and every baseline, and compares the times."""
