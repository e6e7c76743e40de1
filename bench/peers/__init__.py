"""Times steps of other training libraries, each in a separate process, so that its settings cannot affect ours."""
