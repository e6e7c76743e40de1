"""Lets a run compute on GPUs that a pool lends: train workers hold them for a while, engines sleep and wake."""
