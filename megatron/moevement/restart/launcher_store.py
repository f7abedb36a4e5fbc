"""Setup of torch.distributed through the launcher's key-value store, and of communicators that ranks can abort."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from moevement_core.comms.address import store_address
from moevement_core.rendezvous.store import connect_store
from moevement_core.util.environment import MEMBER_ENV


def meet_in_launcher_store(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``pretrain`` that initialises torch.distributed through the launcher's store, if there is a store."""

    @functools.wraps(original)
    def pretrain(*args: Any, store: Any = None, **kwargs: Any) -> Any:
        if store is None and (address := store_address()):
            store = connect_store(address)
        return original(*args, store=store, **kwargs)

    return pretrain


def force_nccl_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a ``maybe_force_nccl_backend_init`` that also creates communicators in jobs that continue after failures.

    An abort of a group whose communicator was never created leaves kernels of the group's subgroups running. Megatron
    creates the communicator only with its own ``--inprocess-restart``.
    """

    @functools.wraps(original)
    def maybe_force_nccl_backend_init(device_id: Any) -> None:
        original(device_id)
        if MEMBER_ENV in os.environ and device_id is not None and torch.distributed.get_backend() == "nccl":
            torch.distributed.all_reduce(torch.ones(128, device=device_id))
            torch.cuda.synchronize()

    return maybe_force_nccl_backend_init
