"""Position of a rank in the job, and its channels to other ranks."""
