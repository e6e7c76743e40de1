"""The benchmark `headrace bench transfer` compares every store with every baseline on the same rows."""
