"""One process through failures: it is interrupted with all others, and goes on with those that are left.

Knows torch.distributed and nvidia-resiliency-ext, and nothing of what is trained.
"""
