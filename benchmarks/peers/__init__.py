"""Benchmark of this project beside other systems for fault tolerance, on one job in plain torch."""
