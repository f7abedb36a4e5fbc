"""General helpers for files, numbers, flags, signals and output."""
