"""Surroundings of a training run: its record, its retained state, its dense checkpoints."""
