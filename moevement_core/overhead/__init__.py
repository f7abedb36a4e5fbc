"""Measurement of the cost of saving: iterations without digests and sends (quiet ones) are compared with others."""
