"""Import of Megatron without its warnings about packages that are not installed and not needed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Suppress warnings of imports in a ``with`` block.

    Each module of Megatron warns that Apex and Transformer Engine are missing. Machines without a GPU never have the
    two packages, and token files do not need them. Torch's warning about a CUDA toolkit without a GPU stays suppressed
    after the block.
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
