"""Engines that several runs share by their adapters: one run's part of each kind of engine."""
