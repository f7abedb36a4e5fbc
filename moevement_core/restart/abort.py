"""Make everything that waits for another process give up waiting."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection

from nvidia_resiliency_ext.inprocess.abort import Abort, AbortTorchDistributed
from nvidia_resiliency_ext.inprocess.state import FrozenState

from moevement_core.replication import transport
from moevement_core.restart.connections import shut_down, shut_down_listeners
from moevement_core.restart.leaving import Leaving, LeavingPhase
from moevement_core.tcp import Endpoint, Ends

DRAIN_S = 5.0
"""Seconds that sends and receives of background threads have to notice that their connections are gone."""


class AbortAll(Abort):
    """Ends every communication of this process with other ranks; runs on the wrapper's monitoring thread.

    Destroying a gloo group frees nobody who waits in it (torch 2.13 has no abort for gloo), and neither does the death
    of a rank that is only stopped. With its sockets shut down, every wait of gloo ends with an error at once.

    Args:
        store: where the job's store listens; connections to it stay.
        groups: those of them that process groups are made through, which do not.
        before: called first; whatever must know that errors to come are nobody's fault.
        leaving: is given each phase when it begins; the last one is the main thread's.
        listeners: sockets that listened before any process group was made, by inode; they go on.
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

    def __call__(self, state: FrozenState) -> FrozenState:  # on the wrapper's monitoring thread
        """Abort all communication of this process."""
        leaving = self._leaving
        self._before()
        leaving.begin(LeavingPhase.SHUT_DOWN)
        transport.refuse()
        shut_down_listeners(self._listeners)  # a rank that makes a communicator of NCCL may wait to be called
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
    """Destroy the buffers through which Transformer Engine overlaps products with communication; not run on a GPU.

    The package's ``AbortTransformerEngine`` also resets the registry of FP8 scales. Modules that outlive the abort
    would never register in it again, and their scales would stay as they are for the rest of the job.
    """
    if (engine := sys.modules.get("transformer_engine.pytorch")) is not None:
        engine.module.base.destroy_ub()
