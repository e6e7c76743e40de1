"""Computes log-probs and entropies over the vocabulary, whole or split over ranks."""
