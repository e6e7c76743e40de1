"""Training: the actor that hosts a train backend, and how each train rank gets its rows."""
