"""Import of Megatron without its warnings about packages that are not installed and not needed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Suppress warnings of imports in a ``with`` block.

    Each module of Megatron warns that Apex and Transformer Engine are missing. On a CPU they always are, and token
    files need neither. The block also silences torch's warning about a CUDA toolkit without a GPU, from then on.
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
