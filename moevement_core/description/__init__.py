"""What a training job is, without running it: model, parallel layout, cluster."""
