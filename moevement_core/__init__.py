"""The engine of MoEvement: fault tolerance for training, without any knowledge of a trainer. This is the tour.

Every rank of a job makes a :class:`Session` on top of a :class:`Binding`, which describes its trainer: which operators
the rank holds (:class:`Operator`, :class:`OperatorState`), what an iteration changes beside them, how an update is
made, and how an iteration is run again. From then on:

1. **In every iteration** the session captures a slice of the state, ``SS_t``, while the next iteration runs
   (``engine/``), as a :class:`Strategy` plans it (``strategies/``, ``policy/``), and sends it to peers on other nodes
   (``replication/``). What crosses pipeline stages is logged (``boundary_log.py``). ``persistence/`` writes windows of
   slices to disk. An optimizer step is committed (:class:`Commit`): a failure leaves it whole or undone.
2. **A rank fails.** The launcher (``launching/``) and its coordinator (``rendezvous/``) notice, and give its rank to a
   spare. All other ranks are interrupted, whatever they wait for, and enter training again (``restart/``).
3. **Ranks meet** (``session/rejoin.py``), agree on the iteration to resume (``recovery/agree.py``), plan the way there
   from what each of them holds (``recovery/plan.py``), fetch it, and replay the stages that lost their state
   (``recovery/replay.py``), while their neighbours feed them from logs. Everything is verified (``recovery/check.py``).

:func:`train` and :func:`iterations` do it for a loop of one's own: read ``examples/plain_torch/train.py`` first, then
``trainer/binding.py``, ``session/session.py``, ``session/rejoin.py``, ``recovery/replay.py`` and ``strategies/``.
``simulator/`` costs the same strategies at any scale, without running anything.

Names are imported when they are first used: planning and simulation work without loading torch.distributed.
Nothing below this package imports ``megatron``; a unit test keeps it so.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from moevement_core.engine.layout import OperatorState as OperatorState
    from moevement_core.errors import ConfigError as ConfigError
    from moevement_core.errors import RecoveryError as RecoveryError
    from moevement_core.operators import Operator as Operator
    from moevement_core.operators import OperatorKind as OperatorKind
    from moevement_core.operators import OperatorTable as OperatorTable
    from moevement_core.operators import StateBytes as StateBytes
    from moevement_core.operators import expert_name as expert_name
    from moevement_core.operators import gate_name as gate_name
    from moevement_core.operators import layer_name as layer_name
    from moevement_core.operators import non_expert_name as non_expert_name
    from moevement_core.policy.popularity import Ordering as Ordering
    from moevement_core.policy.schedule import Saved as Saved
    from moevement_core.recovery.feed import Alone as Alone
    from moevement_core.recovery.replay import Trainer as Trainer
    from moevement_core.session.loop import iterations as iterations
    from moevement_core.session.loop import train as train
    from moevement_core.session.session import Session as Session
    from moevement_core.snapshot.snapshot import Snapshot as Snapshot
    from moevement_core.snapshot.snapshot import StateTensor as StateTensor
    from moevement_core.strategies import Strategy as Strategy
    from moevement_core.trainer.binding import Binding as Binding
    from moevement_core.trainer.binding import Counts as Counts
    from moevement_core.trainer.binding import Place as Place
    from moevement_core.trainer.commit import Commit as Commit
    from moevement_core.trainer.commit import Mark as Mark
    from moevement_core.trainer.commit import UpdateCommit as UpdateCommit
    from moevement_core.trainer.commit import Vote as Vote
    from moevement_core.trainer.config import SessionConfig as SessionConfig
    from moevement_core.trainer.config import add_session_flags as add_session_flags

_HOMES = {
    "engine.layout": ("OperatorState",),
    "errors": ("ConfigError", "RecoveryError"),
    "operators": (
        "Operator", "OperatorKind", "OperatorTable", "StateBytes", "expert_name", "gate_name", "layer_name",
        "non_expert_name",
    ),
    "policy.popularity": ("Ordering",),
    "policy.schedule": ("Saved",),
    "recovery.feed": ("Alone",),
    "recovery.replay": ("Trainer",),
    "trainer.binding": ("Binding", "Counts", "Place"),
    "trainer.commit": ("Commit", "Mark", "UpdateCommit", "Vote"),
    "trainer.config": ("SessionConfig", "add_session_flags"),
    "session.loop": ("iterations", "train"),
    "session.session": ("Session",),
    "snapshot.snapshot": ("Snapshot", "StateTensor"),
    "strategies": ("Strategy",),
}  # fmt: skip
"""The public names, by the module that each lives in."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
