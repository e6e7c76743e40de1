"""Implements `headrace bench hosts`, and the hosts made of namespaces on which it and the tests run."""
