"""The store that ranks meet in. The launcher holds it, so that every rank, rank 0 too, may die."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

STORE_ENV = "MOEVEMENT_STORE"
"""``host:port`` of the launcher's store; unset where ranks meet at MASTER_ADDR and MASTER_PORT."""


def meet_in_launcher_store(original: Callable[..., Any]) -> Callable[..., Any]:
    """``pretrain`` that initialises torch.distributed through the launcher's store, where there is one."""

    @functools.wraps(original)
    def pretrain(*args: Any, store: Any = None, **kwargs: Any) -> Any:
        if store is None and (address := os.environ.get(STORE_ENV)):
            host, port = address.rsplit(":", 1)
            store = torch.distributed.TCPStore(host, int(port), is_master=False, timeout=timedelta(minutes=10))
        return original(*args, store=store, **kwargs)

    return pretrain
