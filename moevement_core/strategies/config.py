"""Flags of strategies: what snapshots hold, and when they are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from moevement_core.errors import ConfigError
from moevement_core.overhead.cap import OVERHEAD_CAP
from moevement_core.policy.dynamic_k import PLT_LIMIT
from moevement_core.policy.popularity import Ordering, OrderingConfig
from moevement_core.policy.reorder import ReorderThresholds
from moevement_core.policy.window import WindowKind
from moevement_core.snapshot.agreement import MOST_PERIOD
from moevement_core.strategies.registry import names, strategy_class
from moevement_core.util.flags import AUTO, flag, flags_of, within

if TYPE_CHECKING:
    from moevement_core.strategies.strategy import StageOperators, Strategy


class RecoveryKind(StrEnum):
    """Method that restores lost state."""

    REPLAY = "replay"
    REDO = "redo"
    AUTO = "auto"


class Selection(StrEnum):
    """Method that selects the experts that MoC-System saves."""

    SEQUENTIAL = "sequential"
    LOAD = "load"


NO_STRATEGY = "none"
"""Name that stands for no strategy: nothing is saved."""
DEFAULT_STRATEGY = "moevement"


def _iterations(name: str, text: str) -> int | None:
    if text == AUTO:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MOST_PERIOD:
        raise ConfigError(f"{name} {text}; needs auto, or a number of iterations from 1 to {MOST_PERIOD}")
    return int(text)


def _experts(name: str, text: str | None) -> int | str | None:
    if text is None or text == AUTO:
        return text
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name} {text}; needs auto, or a number of 1 or more")
    return int(text)


@dataclass(frozen=True)
class StrategyConfig:
    """Configuration of the strategy: what snapshots hold, and when they are taken."""

    name: str = flag(
        "--moevement-strategy", choices=[*names(), NO_STRATEGY], default=DEFAULT_STRATEGY,
        help="state that snapshots hold, and where they are kept. moevement: a slice of the state every iteration, on "
        "peers; dense: the whole state every K iterations, on peers; with both, only the stages that lost state roll "
        "back. With the following, all ranks roll back. checkfreq: the whole state on disk; gemini: the whole state on "
        "the peers of a group; moc: some of the experts, so that a failure loses updates of the others; moetion: the "
        "experts with the most tokens at risk, with the same loss. none: nothing is saved (default: moevement; "
        "docs/strategies.md)",
    )  # fmt: skip
    dense_interval: int | None = flag(
        "--moevement-dense-interval", type=int, metavar="K",
        help="iterations from one snapshot to the next, for --moevement-strategy dense, checkfreq, gemini, moc or "
        "moetion (default: 10 for moc and 1 for moetion; for the others the shortest interval that links and "
        "--moevement-overhead-cap allow, but 10 or more for dense)",
    )  # fmt: skip
    experts: int | str | None = flag(
        "--moevement-snapshot-experts", metavar="K|auto", check=_experts,
        help="number of experts of each layer in a snapshot, for --moevement-strategy moc (default: an eighth of the "
        "experts) or moetion (default: auto). auto: the largest number that the measured bandwidths allow; for moc, "
        "that copies from the device carry in one iteration",
    )  # fmt: skip
    persisted: int | None = flag(
        "--moevement-persist-experts", type=int, metavar="K",
        help="number of experts of each layer that a snapshot writes to disk, for --moevement-strategy moc (default: "
        "all experts in the snapshot)",
    )  # fmt: skip
    selection: Selection | None = flag(
        "--moevement-selection", choices=[str(selection) for selection in Selection],
        check=lambda name, value: None if value is None else Selection(value),
        help="selection of the experts in a snapshot, for --moevement-strategy moc. sequential: all experts in turn; "
        "load: the experts of each layer with the most unsaved updates (default: sequential)",
    )  # fmt: skip
    plt_limit: float | None = flag(
        "--moevement-plt-limit", type=float, metavar="F",
        help="share of lost tokens above which a snapshot holds more experts, for --moevement-strategy moc; with 1, "
        f"the number of experts never changes (default: {PLT_LIMIT})",
    )  # fmt: skip
    capacity_boost: float | None = flag(
        "--moevement-capacity-boost", type=float, metavar="F",
        help="extra capacity, as a share of an expert's capacity, for experts that lost tokens in a failure; it ends "
        "when an expert has received as many extra tokens as it lost. For --moevement-strategy moetion with a capacity "
        "factor (default: no extra capacity; 0.1 in the paper)",
    )  # fmt: skip
    overhead_cap: float | None = flag(
        "--moevement-overhead-cap", type=float, metavar="F",
        help="share of training time that saving may cost. Unless windows or intervals are given, the job chooses them "
        f"so that the measured cost stays below this share; not for moc and moetion (default: {OVERHEAD_CAP}, and "
        "more while ranks fail so often that saving more costs less in all; "
        "checkfreq: 0.035; gemini: no cap)",
    )  # fmt: skip
    window: int | None = flag(
        "--moevement-window", default=AUTO, metavar="auto|N", check=_iterations,
        help="W, number of snapshots in a window, which together hold the whole state. With a number, windows follow "
        "each other without a rest. auto: the smallest W for which copies from the device are fast enough, and windows "
        "as often as links and --moevement-overhead-cap allow (default: auto)",
    )  # fmt: skip
    window_kind: WindowKind = flag(
        "--moevement-window-kind", choices=[str(kind) for kind in WindowKind], default=str(WindowKind.ALIGNED),
        check=lambda name, value: WindowKind(value),
        help="kind of windows. aligned: a failure rolls back W to 2W iterations; rolling: a failure rolls back W "
        "iterations, and snapshots have more bytes (default: aligned)",
    )  # fmt: skip
    recovery: RecoveryKind = flag(
        "--moevement-recovery", choices=[str(recovery) for recovery in RecoveryKind], default=str(RecoveryKind.REPLAY),
        check=lambda name, value: RecoveryKind(value),
        help="method that restores lost state. replay: the stages that lost state execute iterations again; redo: "
        "snapshots on peers hold reduced gradients beside the state, and only the replacement of a lost rank repeats "
        "updates; auto: redo if the measured bandwidths are enough for the gradients, and replay otherwise (default: "
        "replay; with Adam on GPUs auto)",
    )  # fmt: skip
    order: str | None = flag(
        "--moevement-order", choices=[str(order) for order in Ordering],
        help="statistic that orders the operators of a window, from the least to the most popular. hard: tokens of "
        "each expert; soft: its gate probabilities; decayed: moving average of its tokens; capacity: its tokens over "
        "its capacity; back-to-front: none, from the head to the embedding (default: hard; back-to-front for models "
        "without experts)",
    )  # fmt: skip
    order_alpha: float = flag(
        "--moevement-order-alpha", type=float, default=0.9, check=within(0.0, 1.0), metavar="A",
        help="weight of earlier counts, from 0 to 1, for --moevement-order decayed (default: 0.9)",
    )  # fmt: skip
    reorder_threshold: float = flag(
        "--moevement-reorder-threshold", type=float, default=0.10, check=within(0.0), metavar="F",
        help="relative change of an expert's activation share above which the expert has changed (default: 0.10)",
    )  # fmt: skip
    reorder_fraction: float = flag(
        "--moevement-reorder-fraction", type=float, default=0.25, check=within(0.0, 1.0), metavar="F",
        help="fraction of experts; operators are reordered when at least this fraction has changed (default: 0.25)",
    )  # fmt: skip
    has_experts: bool = True
    """True if the model has experts."""

    def __post_init__(self) -> None:
        if self.window is not None and "window" not in self.kind.flags:
            raise ConfigError(
                f"--moevement-window {self.window} has no effect with --moevement-strategy {self.name}; give "
                f"--moevement-window {AUTO}, or --moevement-strategy {' or '.join(_with('window'))}"
            )
        for entry, declared in flags_of(type(self)):
            value = getattr(self, entry.name)
            if entry.name in OPTIONAL and value is not None and entry.name not in self.kind.flags:
                raise ConfigError(
                    f"{declared.name} {value} has no effect with --moevement-strategy {self.name}; leave it out, or "
                    f"give one of these: --moevement-strategy {', '.join(_with(entry.name))}"
                )
        if self.experts == AUTO and self.selection is Selection.LOAD:
            raise ConfigError(
                f"--moevement-snapshot-experts {AUTO} with --moevement-selection {Selection.LOAD}; needs a number of "
                f"experts, or --moevement-selection {Selection.SEQUENTIAL}"
            )
        if self.persisted is not None and (self.persisted < 1 or self.selection is Selection.LOAD):
            raise ConfigError(
                f"--moevement-persist-experts {self.persisted} with --moevement-selection "
                f"{self.selection or Selection.SEQUENTIAL}; needs 1 or more experts, and --moevement-selection "
                f"{Selection.SEQUENTIAL}"
            )
        if self.plt_limit is not None and not 0 < self.plt_limit <= 1:
            raise ConfigError(f"--moevement-plt-limit {self.plt_limit}; needs a share above 0 and up to 1")
        if self.capacity_boost is not None and not 0 < self.capacity_boost <= 1:
            raise ConfigError(f"--moevement-capacity-boost {self.capacity_boost}; needs a share above 0 and up to 1")
        if not 0 < self.cap < 1:
            raise ConfigError(f"--moevement-overhead-cap {self.overhead_cap}; needs a share above 0 and below 1")
        if self.recovery is RecoveryKind.REDO and "recovery" not in self.kind.flags:
            raise ConfigError(
                f"--moevement-recovery {self.recovery} is not possible with --moevement-strategy {self.name}; give "
                f"another recovery, or --moevement-strategy {' or '.join(_with('recovery'))}"
            )
        if self.interval is not None and not 1 <= self.interval <= MOST_PERIOD:
            raise ConfigError(
                f"--moevement-dense-interval {self.interval}; needs a number of iterations from 1 to {MOST_PERIOD}"
            )
        _ = self.ordering, self.thresholds  # both raise ConfigError for impossible values

    @property
    def kind(self) -> type[Strategy]:
        """Class of the strategy."""
        base = strategy_class(self.name)
        if "recovery" in base.flags:
            return strategy_class(self.name, self.recovery)
        return strategy_class(self.name, self.selection)

    @property
    def interval(self) -> int | None:
        """Iterations from one snapshot to the next: the user's number or the strategy's default; else None."""
        return self.kind.interval_by_default if self.dense_interval is None else self.dense_interval

    @property
    def lost_limit(self) -> float:
        """Share of lost tokens above which MoC-System saves more experts."""
        return PLT_LIMIT if self.plt_limit is None else self.plt_limit

    @property
    def given_experts(self) -> int | None:
        """Number of experts of each layer in a snapshot; None if the user gave no number."""
        return self.experts if isinstance(self.experts, int) else None

    @property
    def cap(self) -> float:
        """Share of training time that saving may cost: the user's, or the strategy's default."""
        if self.overhead_cap is not None:
            return self.overhead_cap
        return OVERHEAD_CAP if self.kind.cap_by_default is None else self.kind.cap_by_default

    @property
    def kept_cap(self) -> float | None:
        """Value of :attr:`cap`; None if the cost of this strategy is not limited, as with MoC-System."""
        return self.kind.cap_by_default if self.overhead_cap is None else self.overhead_cap

    @property
    def default_cap(self) -> float | None:
        """Default cap of a strategy that saves more while ranks fail often; None if the cap always holds.

        A cap that the user gave always holds.
        """
        return self.kind.cap_by_default if self.overhead_cap is None and self.kind.exceeds_cap else None

    @property
    def may_redo(self) -> bool:
        """True if a recovery may repeat updates from logged gradients, so that it replays no iteration."""
        return self.recovery is not RecoveryKind.REPLAY

    @property
    def logs_gradients(self) -> bool:
        """True if snapshots may hold gradients in place of state."""
        return self.may_redo or (self.kind.chains_gradients and self.interval == 1)

    @property
    def ordering(self) -> OrderingConfig:
        """Statistic that orders the operators of a window, and its parameter."""
        default = Ordering.HARD_COUNT if self.has_experts else Ordering.BACK_TO_FRONT
        return OrderingConfig(Ordering(self.order or default), self.order_alpha)

    @property
    def needs_capacity(self) -> bool:
        """True if the capacity of each expert decides the order of operators."""
        return self.kind.orders_by_popularity and self.ordering.ordering is Ordering.CAPACITY

    @property
    def thresholds(self) -> ReorderThresholds:
        """Thresholds for changes of popularity that trigger a new order."""
        return ReorderThresholds(self.reorder_threshold, self.reorder_fraction)

    def of(self, stage: StageOperators) -> Strategy:
        """Return the strategy of a stage; see :meth:`Strategy.of`."""
        return self.kind.of(self, stage)


OPTIONAL = ("dense_interval", "experts", "selection", "persisted", "plt_limit", "capacity_boost", "overhead_cap")
"""Fields of :class:`StrategyConfig` that are None unless the user gives them, and that not every strategy uses."""


def _with(field: str) -> Sequence[str]:
    """Return the names of the strategies on which a field of :class:`StrategyConfig` has an effect."""
    return [name for name in names() if field in strategy_class(name).flags]
