"""Setup of torch.distributed through the launcher's key-value store, and of communicators that ranks can abort."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from moevement_core.comms.address import store_address
from moevement_core.rendezvous.store import connect_store
from moevement_core.util.environment import MEMBER_ENV


def meet_in_launcher_store(original: Callable[..., Any], *args: Any, store: Any = None, **kwargs: Any) -> Any:
    """Initialise torch.distributed through the launcher's store, if there is a store, in ``pretrain``."""
    if store is None and (address := store_address()):
        store = connect_store(address)
    return original(*args, store=store, **kwargs)


def force_nccl_init(original: Callable[[Any], None], device_id: Any) -> None:
    """Create communicators also in jobs that continue after failures, in ``maybe_force_nccl_backend_init``.

    An abort of a group whose communicator was never created leaves kernels of the group's subgroups running. Megatron
    creates the communicator only with its own ``--inprocess-restart``.
    """
    original(device_id)
    if MEMBER_ENV in os.environ and device_id is not None and torch.distributed.get_backend() == "nccl":
        torch.distributed.all_reduce(torch.ones(128, device=device_id))
        torch.cuda.synchronize()
