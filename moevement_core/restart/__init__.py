"""Restart in place: a process is interrupted together with all other ranks, and goes on in the next generation.

The package knows torch.distributed and nvidia-resiliency-ext, but nothing of the trainer.
"""
