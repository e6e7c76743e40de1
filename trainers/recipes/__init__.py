"""Recipes: the gallery of `examples/`, and stand-ins for the models and data sets that it names."""
