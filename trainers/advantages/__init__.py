"""Advantage estimators turn the rewards of a step's rows into one advantage per row."""
