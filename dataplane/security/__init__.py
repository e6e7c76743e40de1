"""Guards the ports of a data plane: a peer must prove that it knows the run's key before a message is decoded."""
