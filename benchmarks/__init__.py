"""Measurements, each a command that writes its own table."""
