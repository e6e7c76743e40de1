"""Weights: how a version of the weights is published, carried to the engines and received there."""
