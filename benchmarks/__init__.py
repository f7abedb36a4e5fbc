"""Benchmarks of this project, each a command that writes its own page."""
