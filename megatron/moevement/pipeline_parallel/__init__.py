"""Traffic over pipeline boundaries: the log of sent tensors, and feeds from the log for stages that replay alone."""
