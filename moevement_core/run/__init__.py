"""The run directory: its files and events, the metrics computed from them, and the comparison of two runs."""
