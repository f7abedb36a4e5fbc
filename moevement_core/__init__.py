"""Engine of MoEvement: fault tolerance for any trainer. This docstring is a tour of the package.

Every rank of a job creates a :class:`Session` on a :class:`Binding`, which describes the trainer. The binding provides
the operators of the rank (:class:`Operator`, :class:`OperatorState`) and the other state that an iteration changes. It
also defines how the trainer updates weights and re-executes an iteration. From then on:

1. **In every iteration** the session captures a snapshot ``SS_t``, which is a part of the rank's state, while the next
   iteration runs (``engine/``). A :class:`Strategy` plans what each snapshot holds (``strategies/``, ``policy/``).
   Background threads send snapshots to peers, which are ranks on other nodes (``replication/``), and write windows to
   disk (``storage/``). The boundary log keeps the tensors that the rank sends to other pipeline stages
   (``recovery/boundary_log.py``). A commit point makes an optimizer step atomic under failures (:class:`Commit`).
2. **A rank fails.** The launcher (``launching/``) and its coordinator (``rendezvous/``) detect the failure and give the
   rank to a spare. The restart guard interrupts all survivors, even ranks that wait for another rank, and they enter
   training again (``restart/``).
3. **Ranks recover** (``session/after_failure.py``). They agree on the iteration to resume (``recovery/agree.py``), plan
   the recovery from the snapshots that each rank has (``recovery/plan.py``), and fetch snapshots. The stages that lost
   their state replay: they execute iterations again (``recovery/replay.py``). Neighbouring stages send them logged
   tensors. Digests verify the result (``recovery/check.py``).

:func:`train` and :func:`iterations` make all these calls for a custom training loop. Read first
``examples/plain_torch/train.py``, then ``trainer/binding.py``, ``session/session.py``, ``session/after_failure.py``,
``recovery/replay.py`` and ``strategies/``. ``simulator/`` computes the cost of the same strategies at any scale,
without a job.

Names are imported at their first use, so planning and simulation work without torch.distributed. Nothing in this
package imports ``megatron``; a unit test checks that.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from moevement_core.audit.config import AuditConfig as AuditConfig
    from moevement_core.audit.evidence import AuditedModel as AuditedModel
    from moevement_core.audit.observe import before_reductions as before_reductions
    from moevement_core.elastic.config import ElasticConfig as ElasticConfig
    from moevement_core.engine.config import BudgetConfig as BudgetConfig
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
    from moevement_core.recovery.feed import Feeding as Feeding
    from moevement_core.recovery.replay import Trainer as Trainer
    from moevement_core.rendezvous.config import TimeoutsConfig as TimeoutsConfig
    from moevement_core.replication.config import CopiesConfig as CopiesConfig
    from moevement_core.session.loop import iterations as iterations
    from moevement_core.session.loop import train as train
    from moevement_core.session.session import Session as Session
    from moevement_core.snapshot.snapshot import Snapshot as Snapshot
    from moevement_core.snapshot.snapshot import StateTensor as StateTensor
    from moevement_core.speed.config import SpeedConfig as SpeedConfig
    from moevement_core.storage.config import DiskConfig as DiskConfig
    from moevement_core.strategies import Strategy as Strategy
    from moevement_core.strategies.config import StrategyConfig as StrategyConfig
    from moevement_core.trainer.binding import Binding as Binding
    from moevement_core.trainer.capabilities import Counts as Counts
    from moevement_core.trainer.commit import Commit as Commit
    from moevement_core.trainer.commit import Mark as Mark
    from moevement_core.trainer.commit import UpdateCommit as UpdateCommit
    from moevement_core.trainer.commit import Vote as Vote
    from moevement_core.trainer.config import SessionConfig as SessionConfig
    from moevement_core.trainer.config import add_session_flags as add_session_flags
    from moevement_core.trainer.interface import BindingInterface as BindingInterface
    from moevement_core.trainer.interface import Place as Place
    from moevement_core.trainer.token_counts import TokenCounts as TokenCounts
    from moevement_core.trainer.torch_binding import TorchBinding as TorchBinding

_HOMES = {
    "audit.config": ("AuditConfig",),
    "elastic.config": ("ElasticConfig",),
    "engine.config": ("BudgetConfig",),
    "rendezvous.config": ("TimeoutsConfig",),
    "replication.config": ("CopiesConfig",),
    "speed.config": ("SpeedConfig",),
    "storage.config": ("DiskConfig",),
    "strategies.config": ("StrategyConfig",),
    "audit.evidence": ("AuditedModel",),
    "audit.observe": ("before_reductions",),
    "engine.layout": ("OperatorState",),
    "errors": ("ConfigError", "RecoveryError"),
    "operators": (
        "Operator", "OperatorKind", "OperatorTable", "StateBytes", "expert_name", "gate_name", "layer_name",
        "non_expert_name",
    ),
    "policy.popularity": ("Ordering",),
    "policy.schedule": ("Saved",),
    "recovery.feed": ("Feeding",),
    "recovery.replay": ("Trainer",),
    "trainer.binding": ("Binding",),
    "trainer.capabilities": ("Counts",),
    "trainer.commit": ("Commit", "Mark", "UpdateCommit", "Vote"),
    "trainer.config": ("SessionConfig", "add_session_flags"),
    "trainer.interface": ("BindingInterface", "Place"),
    "trainer.token_counts": ("TokenCounts",),
    "trainer.torch_binding": ("TorchBinding",),
    "session.loop": ("iterations", "train"),
    "session.session": ("Session",),
    "snapshot.snapshot": ("Snapshot", "StateTensor"),
    "strategies": ("Strategy",),
}  # fmt: skip
"""Public names, by the module that defines them."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
