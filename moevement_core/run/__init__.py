"""The run directory: records, events, figures, and the comparison of two runs."""
