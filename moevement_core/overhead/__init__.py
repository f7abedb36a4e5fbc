"""Measurement of what saving costs training, by comparison of quiet iterations with their neighbours."""
