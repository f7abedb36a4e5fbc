"""A stranger without the job's token, who reaches every socket of a job that runs."""
