"""Reads values of config keys from YAML and from the command line."""
