"""The chaos benchmark injects faults into real runs at random moments, and checks that no row is lost or doubled."""
