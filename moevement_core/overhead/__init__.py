"""What saving costs training, measured while the job trains: quiet iterations, compared with their neighbours."""
