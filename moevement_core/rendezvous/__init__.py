"""Who takes part in a job, and as which rank, through failures."""
