"""Runtime of a training run: its record, its retained state, and its dense checkpoints."""
