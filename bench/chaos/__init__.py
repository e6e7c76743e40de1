"""Chaos: injures real runs at random moments and checks that they lose and double no row."""
