"""Description and checkpoint plan of a training job that does not run: model, parallel layout, cluster, cost."""
