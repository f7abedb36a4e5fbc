"""Measurement of what saving costs training, while the job trains: quiet iterations, compared with their neighbours."""
