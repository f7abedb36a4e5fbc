"""Configuration of a session: flags of copies, disk, strategy and others, each declared beside the code it controls."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from typing import Any

from moevement_core.audit.config import AUDIT_INTERVAL, AUDIT_MEMORY, AuditConfig
from moevement_core.elastic.config import SWITCH as ELASTIC
from moevement_core.elastic.config import ElasticConfig
from moevement_core.engine.config import BudgetConfig, KeepOwn, Verify, VerifyConfig
from moevement_core.errors import ConfigError
from moevement_core.monitoring.config import MetricsConfig, unserved
from moevement_core.rendezvous.config import TimeoutsConfig
from moevement_core.replication.config import CopiesConfig
from moevement_core.restart.drills import DrillConfig
from moevement_core.restart.faults import FlipKind
from moevement_core.speed.config import EVICT_SLOW, SpeedConfig
from moevement_core.storage.config import ON_SPIKE, ROLLBACK_BY, DiskConfig, RollbackConfig
from moevement_core.storage.locations import is_url
from moevement_core.strategies.capabilities import LosesUpdates
from moevement_core.strategies.config import NO_STRATEGY, StrategyConfig
from moevement_core.util.file_modes import FilesConfig, use_file_mode
from moevement_core.util.flags import add_flags, from_args

SWITCH = "--moevement-sparse-ckpt"


@dataclass(frozen=True)
class SessionConfig:
    """Values of all flags of a session, one field for each group of flags. The defaults are those of the flags.

    A script without these flags passes ``SessionConfig()``, or sets single groups, for example
    ``SessionConfig(audit=AuditConfig(interval=1000))``.

    Raises:
        ConfigError: values contradict each other.
    """

    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    copies: CopiesConfig = field(default_factory=CopiesConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    verify: Verify = field(default_factory=lambda: VerifyConfig().verify)
    disk: DiskConfig = field(default_factory=DiskConfig)
    drill: DrillConfig = field(default_factory=DrillConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    rollback: RollbackConfig = field(default_factory=RollbackConfig)

    def __post_init__(self) -> None:
        strategy, disk, budget = self.strategy, self.disk, self.budget
        if strategy.kind.selects_by_load and budget.host_memory_bytes is not None:
            raise ConfigError(
                f"--moevement-host-memory-gb {budget.host_memory_bytes / 1e9:g} with --moevement-strategy "
                f"{strategy.name}: the strategy does not know beforehand which experts a rank saves; leave "
                "--moevement-host-memory-gb out, and give --moevement-snapshot-experts"
            )
        if strategy.persisted is not None and disk.persist_dir is None:
            raise ConfigError(
                f"--moevement-persist-experts {strategy.persisted} without --moevement-persist-dir; give a folder to "
                "write the experts to"
            )
        _refuse_without_folder(disk)
        _refuse_flips_in_stores(self.drill, disk)
        _refuse_to_roll_back(self.rollback, disk)
        if self.elastic.is_elastic:
            _refuse_in_elastic_jobs(strategy, self.speed, self.audit)
        copies = _copies(self.copies, strategy, disk)
        _refuse_to_drop(budget, copies, disk)
        object.__setattr__(self, "copies", copies)

    @staticmethod
    def from_args(args: argparse.Namespace, *, has_experts: bool) -> SessionConfig:
        """Return the configuration from the flags of :func:`add_session_flags`.

        Args:
            args: parsed flags.
            has_experts: True if the model has experts.

        Raises:
            ConfigError: a flag has an invalid value, or flags contradict each other.
        """
        use_file_mode(args.moevement_file_mode)  # before this process writes any file
        if args.moevement_strategy == NO_STRATEGY:
            raise ConfigError(f"--moevement-strategy {NO_STRATEGY}: nothing would be saved; give another strategy")
        if (complaint := unserved(args.moevement_metrics_port)) is not None:
            raise ConfigError(complaint)
        return SessionConfig(
            from_args(StrategyConfig, args, has_experts=has_experts),
            from_args(CopiesConfig, args),
            budget=from_args(BudgetConfig, args),
            timeouts=from_args(TimeoutsConfig, args),
            verify=from_args(VerifyConfig, args).verify,
            disk=from_args(DiskConfig, args),
            drill=from_args(DrillConfig, args),
            elastic=from_args(ElasticConfig, args),
            speed=from_args(SpeedConfig, args),
            audit=from_args(AuditConfig, args),
            rollback=from_args(RollbackConfig, args),
        )


def _refuse_in_elastic_jobs(strategy: StrategyConfig, speed: SpeedConfig, audit: AuditConfig) -> None:
    """Refuse what a job that changes its number of ranks cannot do.

    Raises:
        ConfigError: such a flag is given.
    """
    if issubclass(strategy.kind, LosesUpdates):
        raise ConfigError(
            f"{ELASTIC} with --moevement-strategy {strategy.name}: tokens that an expert has lost are counted only on "
            "the ranks that saved the expert; leave one of these flags out"
        )
    if speed.evict_slow:
        raise ConfigError(f"{EVICT_SLOW} with {ELASTIC}: without a spare, the job would shrink; leave {EVICT_SLOW} out")
    if audit.is_on:
        raise ConfigError(
            f"{AUDIT_INTERVAL} or {AUDIT_MEMORY} with {ELASTIC}: a job that changes its ranks cannot go back to an "
            "older state yet; leave one of these flags out"
        )


def _copies(copies: CopiesConfig, strategy: StrategyConfig, disk: DiskConfig) -> CopiesConfig:
    """Return ``copies`` with the placement that the strategy's paper uses, unless a flag gives a placement.

    GEMINI places copies in groups, MoEtion among data-parallel replicas. If a strategy restores from disk alone, ranks
    send no copies.

    Raises:
        ConfigError: the strategy restores from disk alone, but the flags name no folder, or ask for copies.
    """
    if copies.placement is None:
        copies = replace(copies, placement=strategy.kind.placement)
    if not strategy.kind.only_to_disk:
        return copies
    if disk.persist_dir is None:
        raise ConfigError(
            f"--moevement-strategy {strategy.name} without --moevement-persist-dir; the strategy keeps its "
            "checkpoints on disk: give a folder"
        )
    if copies.replicas:
        raise ConfigError(
            f"--moevement-replicas {copies.replicas} with --moevement-strategy {strategy.name}; the strategy sends no "
            "copies to peers: leave --moevement-replicas out"
        )
    return replace(copies, replicas=0)


def _refuse_without_folder(disk: DiskConfig) -> None:
    """Refuse flags about windows on disk without the flag that names their folder.

    Raises:
        ConfigError: such a flag is given.
    """
    if disk.load_iteration is not None and disk.load is None:
        raise ConfigError(
            f"--moevement-load-iteration {disk.load_iteration} without --moevement-load; give the folder of the windows"
        )
    if disk.kept.has_history and disk.persist_dir is None:
        kept = f"-every {disk.keep_every}" if disk.keep_every is not None else f" {disk.keep}"
        raise ConfigError(
            f"--moevement-keep-windows{kept} without --moevement-persist-dir; give a folder to write windows to"
        )


def _refuse_flips_in_stores(drill: DrillConfig, disk: DiskConfig) -> None:
    """Refuse flips of bits in windows of an object store, because objects cannot be changed in place.

    Raises:
        ConfigError: the flags ask for such a flip.
    """
    stores = [location for location in (disk.persist_dir, disk.load) if location is not None and is_url(location)]
    if stores and any(flip.kind is FlipKind.WINDOWS for flip in drill.flips):
        raise ConfigError(
            f"--moevement-inject-flip kind={FlipKind.WINDOWS} with windows in {stores[0]}; bits flip only in files: "
            "give a folder, or another kind"
        )


def _refuse_to_roll_back(rollback: RollbackConfig, disk: DiskConfig) -> None:
    """Refuse a roll back without windows to go back to.

    Raises:
        ConfigError: such a flag is given.
    """
    if rollback.is_on and disk.persist_dir is None:
        raise ConfigError(
            f"{ON_SPIKE} {rollback.on_spike:g} without --moevement-persist-dir; give a folder for the windows that the "
            "job goes back to"
        )
    if rollback.by is not None and not rollback.is_on:
        raise ConfigError(f"{ROLLBACK_BY} {rollback.by} without {ON_SPIKE}; give the size of a spike, or leave it out")


def _refuse_to_drop(budget: BudgetConfig, copies: CopiesConfig, disk: DiskConfig) -> None:
    """Refuse flags that let a rank drop its own snapshots although parity, the disk or the lack of copies needs them.

    Raises:
        ConfigError: ``--moevement-keep-own never`` contradicts one of these flags.
    """
    if budget.keep_own is not KeepOwn.NEVER:
        return
    for flag, needs in (
        (f"--moevement-protection {copies.protection.parity}", copies.protection.parity is not None),
        (f"--moevement-persist-dir {disk.persist_dir}", disk.persist_dir is not None),
        ("--moevement-replicas 0", copies.replicas == 0),
        ("--moevement-replicas 1", copies.replicas == 1),
    ):
        if needs:
            raise ConfigError(
                f"--moevement-keep-own {budget.keep_own} with {flag}; the second flag needs a rank's own snapshots: "
                f"give {KeepOwn.ALWAYS}, or leave --moevement-keep-own out"
            )


def add_session_flags(group: Any, *, has_switch: bool = False) -> None:
    """Add all flags of a session to a parser or an argument group.

    Args:
        group: parser or argument group of ``argparse``.
        has_switch: True to add ``--moevement-sparse-ckpt``, without which nothing is saved.
    """
    if has_switch:
        group.add_argument(
            SWITCH,
            action="store_true",
            help="save a slice of the training state in host memory and on peers in every iteration",
        )
    add_flags(
        group, StrategyConfig, CopiesConfig, BudgetConfig, TimeoutsConfig, VerifyConfig, DiskConfig, FilesConfig,
        MetricsConfig, DrillConfig, ElasticConfig, SpeedConfig, AuditConfig, RollbackConfig,
    )  # fmt: skip
