"""Makes rows of a user's conversations, which train workers learn as they learn rows of rollouts."""
