"""Abort of all communication of this process, so that every wait for another rank ends with an error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection

from nvidia_resiliency_ext.inprocess.abort import Abort, AbortTorchDistributed
from nvidia_resiliency_ext.inprocess.state import FrozenState

from moevement_core.comms import transport
from moevement_core.restart.connections import shut_down, shut_down_listeners
from moevement_core.restart.leaving import Leaving, LeavingPhase
from moevement_core.util.tcp import Endpoint, Ends

DRAIN_S = 5.0
"""Longest wait, in seconds, until background threads notice that their connections are shut down."""


class AbortAll(Abort):
    """Abort of every communication of this process with other ranks; it runs on the guard's monitoring thread.

    Torch 2.13 has no abort for gloo, and destroying a gloo group does not end the waits in it. A peer that hangs or is
    stopped (SIGSTOP) keeps its connections open. So this process shuts down its own sockets, and each of its waits in
    gloo ends at once with an error.

    Args:
        store: endpoints of the job's store; connections to it stay open, except those in ``groups``.
        groups: connections to the store that torch's process groups use; the abort shuts them down.
        before: function that the abort calls first; it notes that all later errors are results of the abort.
        leaving: timer of the phases in which this rank leaves its generation; the abort tells it when a phase begins.
        listeners: inodes of sockets that listened before any process group was made. The abort leaves them open,
            because no process group uses them.
    """

    def __init__(
        self,
        store: Collection[Endpoint],
        groups: Collection[Ends],
        before: Callable[[], None],
        leaving: Leaving,
        listeners: Collection[int],
    ) -> None:
        self._listeners = listeners
        self._store, self._of_groups, self._before, self._leaving = store, groups, before, leaving
        self._groups = AbortTorchDistributed()

    def __call__(self, state: FrozenState) -> FrozenState:
        """Shut down connections, wait for background threads, and abort the process groups; return ``state``."""
        leaving = self._leaving
        self._before()
        leaving.begin(LeavingPhase.SHUT_DOWN)
        transport.refuse()
        shut_down_listeners(self._listeners)  # A rank that makes an NCCL communicator may wait in accept.
        shut_down(self._is_meant)
        leaving.begin(LeavingPhase.DRAIN)
        transport.drained(DRAIN_S)
        leaving.begin(LeavingPhase.ABORT)
        self._groups(state)
        _destroy_user_buffers()
        leaving.begin(LeavingPhase.UNWIND)
        return state

    def _is_meant(self, ends: Ends) -> bool:
        return ends in self._of_groups or not {ends.local, ends.remote} & set(self._store)


def _destroy_user_buffers() -> None:
    """Destroy the buffers through which Transformer Engine overlaps matrix products with communication.

    This function replaces ``AbortTransformerEngine`` of nvidia-resiliency-ext, which also empties the registry of FP8
    scales. Modules outlive the abort and would not register again. Their scales would then stay constant for the rest
    of the job. This function has not been tested on a GPU.
    """
    if (engine := sys.modules.get("transformer_engine.pytorch")) is not None:
        engine.module.base.destroy_ub()
