"""Measurement of what saving costs training: quiet iterations, without digests and sends, are compared with others."""
