"""Training loops of one job: one without fault tolerance, and one for each system."""
