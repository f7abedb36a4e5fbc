"""A failure does not end the job: ranks that live stop what they do, meet again, and enter the trainer again."""
