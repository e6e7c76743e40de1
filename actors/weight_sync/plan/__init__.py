"""The transfer plan says which trainer rank sends which part of a weight to which engine worker, without gathering."""
