"""`headrace bench transfer` moves the same rows through every store and baseline, and compares the times."""
