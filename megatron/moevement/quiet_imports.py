"""Megatron imported without its words on what is not installed, where nothing of that is used."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Import without warnings, in a ``with`` block.

    Each module of Megatron's says that Apex and Transformer Engine are missing: on a CPU they must be, and what makes
    token files needs neither. That there is a CUDA toolkit without a GPU torch does not say afterwards either.
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
