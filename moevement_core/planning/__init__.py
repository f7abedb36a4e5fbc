"""Planning of a training job before it runs: model, parallel layout, cluster, and the cost of checkpoints."""
