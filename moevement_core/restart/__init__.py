"""Restart of training in one process: it is interrupted with all others, and continues with the survivors.

Knows torch.distributed and nvidia-resiliency-ext, and nothing of what is trained.
"""
