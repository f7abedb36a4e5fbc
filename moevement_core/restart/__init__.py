"""Restart in place: a failure interrupts all ranks, and the surviving processes go on in the next generation.

The package uses torch.distributed and nvidia-resiliency-ext. It does not depend on the trainer.
"""
