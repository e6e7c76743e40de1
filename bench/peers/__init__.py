"""Times steps of other training libraries.

Each runs in a process of its own, so that its settings cannot affect ours.
"""
