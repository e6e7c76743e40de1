"""Lets the directory (the metadata service) of a data plane outlive the death of its process."""
