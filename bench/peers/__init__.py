"""Times steps of other training libraries, each in a process of its own, because their settings must not meet ours."""
