"""Times steps of other training libraries, each in a process of its own with its own settings."""
