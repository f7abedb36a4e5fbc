"""Communicator between pipeline stages. It logs sent tensors, and in a replay it receives logged tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.moevement.runtime.job import Process
from moevement_core.recovery.boundary_log import Direction
from moevement_core.recovery.feed import Feeds


class Done:
    """Handle of a transfer that is already complete."""

    def wait(self) -> None:
        """Do nothing, because the transfer is complete."""


def log_and_feed(
    process: Process,
    original: Callable[..., tuple[Any, Any, Any]],
    communicator: Any,
    *,
    tensor_send_next: torch.Tensor | None,
    tensor_send_prev: torch.Tensor | None,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Any,
    wait_on_reqs: bool = True,
) -> tuple[Any, Any, Any]:
    """Log sent tensors, and in a replay receive logged tensors in place of those from stages that keep their state.

    The function replaces ``P2PCommunicator._communicate``, which all nine methods that send or receive call.
    """
    live = process.job.live
    if live.boundary_log is not None:
        for direction, tensor in ((Direction.FORWARD, tensor_send_next), (Direction.BACKWARD, tensor_send_prev)):
            if tensor is not None:
                live.boundary_log.note(direction, tensor)
    feeds = live.feeds or Feeds(None, None)
    # In a replay, this stage exchanges live tensors only with stages that replay at the same time.
    live_next = tensor_send_next if feeds.after is None else None
    live_prev = tensor_send_prev if feeds.before is None else None
    from_prev, from_next = recv_prev and feeds.before is None, recv_next and feeds.after is None
    received_prev = received_next = None
    requests: Any = None if wait_on_reqs else {}
    if live_next is not None or live_prev is not None or from_prev or from_next:
        received_prev, received_next, requests = original(
            communicator, tensor_send_next=live_next, tensor_send_prev=live_prev, recv_prev=from_prev,
            recv_next=from_next, tensor_shape=tensor_shape, wait_on_reqs=wait_on_reqs,
        )  # fmt: skip
    if recv_prev and feeds.before is not None:
        received_prev = _on_device(feeds.before.next())
        if not wait_on_reqs:
            requests["recv_prev"] = Done()
    if recv_next and feeds.after is not None:
        received_next = _on_device(feeds.after.next())
        if not wait_on_reqs:
            requests["recv_next"] = Done()
    return received_prev, received_next, requests


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.cuda.current_device()).requires_grad_(True)
