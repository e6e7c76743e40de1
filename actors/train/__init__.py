"""Training: the actor that hosts a train backend, and how its rank comes by its rows."""
