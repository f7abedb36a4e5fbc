"""Traffic between pipeline stages: the log of sent tensors, and their input into a stage that replays alone."""
