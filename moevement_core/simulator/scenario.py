"""Scenario of a simulation in a YAML file: job, layout, cluster, failures and strategies.

docs/scenarios.md describes every field.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from moevement_core import precision
from moevement_core.errors import ConfigError
from moevement_core.planning.checkpoint_plan import CheckpointPlan, PlanInput
from moevement_core.planning.cluster import ASSUMED_SHARE, CLUSTERS, GB, Cluster
from moevement_core.planning.job import JobShape
from moevement_core.planning.profile import Profile
from moevement_core.planning.transformer import Layout, MultiLatentAttention, Transformer, describe
from moevement_core.policy.window import WindowKind
from moevement_core.precision import Scaling
from moevement_core.simulator.costs import STRATEGIES, Costs
from moevement_core.simulator.experiment import Draws
from moevement_core.simulator.failures import FailureModel, check_count, mean_time_between, recorded
from moevement_core.simulator.iteration import IterationTime, from_machines, from_profile, from_total
from moevement_core.simulator.training import Spares
from moevement_core.util.numbers import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Range

MTBFS_S = (7200.0, 3600.0, 1800.0, 1200.0, 600.0)
"""Mean seconds between failures that are simulated by default: those of table 3 of MoEvement."""
SHOWN = ("checkfreq", "gemini", "moc", "moevement")
"""Strategies that are simulated by default: the systems of table 3 of MoEvement."""


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Settings of checkpointing and recovery."""

    window_kind: str = "aligned"
    window: int | None = None
    """Window W in iterations; None: the smallest W with which copies keep up with training."""
    period: int | None = None
    """Iterations from the start of one window to the start of the next; None: the fewest with which the cost of copies
    stays within the overhead cap."""
    replicas: int = 2
    keeps_own_copies: bool = True
    """True if ranks keep their own snapshots after all peers have them."""
    detect_s: float = 1.0
    regroup_s: float = 10.0
    interference: float = 0.0
    """Seconds that copies to the host add to training, divided by the seconds that these copies take."""
    contention: float | None = None
    """Seconds that copies to peers add to training, divided by the seconds that links need for the copies alone.

    None: the value in the scenario's profile, or 0 if there is no such value.
    """
    weight_gradient_share: float = 1 / 3
    skew: float = 0.0
    """Skew of the popularity of experts, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Settings of failures, and of spare nodes that replace failed ones."""

    mtbf_s: tuple[float, ...] = MTBFS_S
    weibull: float = 1.0
    together: float = 0.0
    processes: float = 0.0
    """Probability that a failure ends processes only, so that host memory of its nodes survives.

    Only the simulation knows such failures. The formula for the ETTR treats every failure as the loss of a node.
    """
    trace: str | None = None
    speedup: float = 1.0
    spares: int | None = None
    repair_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings of the simulated trainings: strategies, length, number and seeds."""

    strategies: tuple[str, ...] = SHOWN
    hours: float = 12.0
    seeds: int = 20
    first_seed: int = 0


@dataclass(frozen=True)
class Scenario:
    """Job on a cluster, with checkpointing, failures and trainings to simulate; :func:`load` reads it from a file."""

    job: JobShape
    cluster: Cluster
    iteration_s: float | None = None
    """Seconds of an iteration; None: those of the profile.

    If the scenario has no profile either, the cluster's rates give an estimate.
    """
    profile: Profile | None = None
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    failures: Failures = field(default_factory=Failures)
    run: Run = field(default_factory=Run)

    def __post_init__(self) -> None:
        for what, value, allowed in (
            ("iteration_s", self.iteration_s, POSITIVE),
            ("hours", self.run.hours, POSITIVE),
            ("speedup", self.failures.speedup, POSITIVE),
            *(("mtbf", mtbf_s, POSITIVE) for mtbf_s in self.failures.mtbf_s),
            ("repair", self.failures.repair_s, Range(0.0, or_infinite=True)),
            ("first_seed", self.run.first_seed, NOT_NEGATIVE),
            ("detect", self.checkpointing.detect_s, NOT_NEGATIVE),
            ("regroup", self.checkpointing.regroup_s, NOT_NEGATIVE),
            ("interference", self.checkpointing.interference, NOT_NEGATIVE),
            ("contention", self.checkpointing.contention, NOT_NEGATIVE),
            ("weight_gradient_share", self.checkpointing.weight_gradient_share, SHARE),
            ("skew", self.checkpointing.skew, SHARE),
            ("processes", self.failures.processes, SHARE),
        ):
            allowed.check(what, value)
        self._check_checkpointing()
        AT_LEAST_ONE.check("seeds", self.run.seeds)
        NOT_NEGATIVE.check("spares", self.failures.spares)
        if not self.failures.mtbf_s or not self.run.strategies:
            raise ConfigError("no failure rate or no strategy; give at least one of each")
        for name in self.run.strategies:
            if name not in STRATEGIES:
                raise ConfigError(f"strategy {name!r}; needs one of {', '.join(STRATEGIES)}")
        if self.cluster.storage_bytes_per_s is None:
            raise ConfigError(
                "the storage bandwidth is missing; give the bandwidth of all nodes together, as cluster.storage in the "
                "scenario or with --storage-bandwidth"
            )

    def _check_checkpointing(self) -> None:
        saved = self.checkpointing
        if saved.window_kind not in tuple(WindowKind):
            raise ConfigError(f"window_kind {saved.window_kind!r}; needs one of {', '.join(WindowKind)}")
        if saved.window is not None and saved.window < 1:
            raise ConfigError(
                f"window {saved.window}; needs 1 or more, or leave window out, so that the plan chooses it"
            )
        AT_LEAST_ONE.check("period", saved.period)
        if saved.replicas < 0:
            raise ConfigError(f"replicas {saved.replicas}; needs 0 or more")

    @property
    def time(self) -> IterationTime:
        """Iteration time. It comes from ``iteration_s``, or else the profile, or else the rates of the cluster."""
        if self.iteration_s is not None:
            return from_total(self.iteration_s, self.job)
        if self.profile is not None:
            return from_profile(self.profile, self.job)
        return from_machines(self.job, self.cluster)

    @property
    def contention(self) -> float:
        """Slow-down of training by copies to peers, as defined by :attr:`Checkpointing.contention`.

        It comes from the scenario's setting, or else from its profile; otherwise it is 0.
        """
        asked = self.checkpointing.contention
        measured = self.profile.contention if self.profile is not None else None
        return next((share for share in (asked, measured) if share is not None), 0.0)

    def costs(self) -> Costs:
        """Return the costs of the job, from which each simulated strategy computes what it costs."""
        saved, time = self.checkpointing, self.time
        plan = CheckpointPlan(
            PlanInput(
                job=self.job, cluster=self.cluster, regime=self.job.regime, iteration_s=time.total_s,
                kind=WindowKind(saved.window_kind), replicas=saved.replicas, window=saved.window, period=saved.period,
                contention=self.contention, keeps_own_copies=saved.keeps_own_copies,
            )
        )  # fmt: skip
        assert self.cluster.storage_bytes_per_s is not None
        return Costs(
            plan, time, storage_bytes_per_s=self.cluster.storage_bytes_per_s, detect_s=saved.detect_s,
            regroup_s=saved.regroup_s, interference=saved.interference,
            weight_gradient_share=saved.weight_gradient_share, skew=saved.skew, skew_seed=self.run.first_seed,
        )  # fmt: skip

    @property
    def until_s(self) -> float:
        """Wall seconds of a training."""
        return self.run.hours * 3600

    def draws(self) -> list[Draws]:
        """Return the failures at each rate: random failures for every seed, or the failures of the trace.

        Raises:
            ConfigError: the trace has no failure in the simulated time.
        """
        nodes, how = math.ceil(self.job.ranks / self.cluster.gpus_per_node), self.failures
        if how.trace is not None:
            failures = [
                failure for failure in recorded(Path(how.trace), nodes, how.speedup) if failure.at_s < self.until_s
            ]
            if not failures:
                raise ConfigError(
                    f"trace {how.trace}: no failure in {self.run.hours:g} hours at speedup {how.speedup:g}; needs at "
                    "least one failure: give more hours or a larger speedup"
                )
            return [Draws(mean_time_between(failures, self.until_s), (failures,))]
        seeds = range(self.run.first_seed, self.run.first_seed + self.run.seeds)
        for mtbf_s in how.mtbf_s:
            check_count(mtbf_s, self.until_s, self.run.seeds)
        models = [
            FailureModel(mtbf_s, nodes, how.weibull, how.together, processes=how.processes) for mtbf_s in how.mtbf_s
        ]
        return [
            Draws(model.mtbf_s, tuple(model.draw(self.until_s, seed) for seed in seeds), how.together)
            for model in models
        ]

    def spares(self) -> Spares:
        """Return the spare nodes of a training."""
        return Spares(self.failures.spares, self.failures.repair_s)


def is_scenario(path: Path) -> bool:
    """Return True if a file is a scenario; False if it is a list of Megatron's flags."""
    return isinstance(_read(path).get("job"), Mapping)


def load(path: Path, ranks: int | None = None, *, grows_batch: bool = False) -> Scenario:
    """Read a scenario from a file.

    Args:
        path: path of the file.
        ranks: number of ranks, which replaces the number in the file; None to keep that number. Only the data-parallel
            size changes.
        grows_batch: True if the global batch size of the file grows or shrinks with the data-parallel size, so that
            each rank keeps its number of micro-batches.

    Raises:
        ConfigError: the file is not a valid scenario; the message names the file and the field.
    """
    fields = dict(_read(path))
    try:
        if ranks is not None:
            layout, model = _section(fields, "parallel"), _section(fields, "job")
            fields["parallel"] = {**layout, "ranks": ranks}
            if grows_batch:
                fields["job"] = {**model, "global_batch_size": model["global_batch_size"] * ranks // layout["ranks"]}
        return _scenario(path, fields)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: holds no fields; needs fields and values")
    return content


def _scenario(path: Path, fields: dict[str, Any]) -> Scenario:
    known = {"job", "parallel", "cluster", "iteration_s", "profile", "checkpointing", "failures", "run"}
    _refuse_unknown("", fields, known)
    measured = None
    if (named := fields.get("profile")) is not None:
        measured = Profile.load(path.parent / str(named))
    failures = _section(fields, "failures")
    if failures.get("trace") is not None:
        failures["trace"] = str(path.parent / str(failures["trace"]))
    iteration_s = fields.get("iteration_s")
    return Scenario(
        job=_job(path.stem, _section(fields, "job"), _section(fields, "parallel")),
        cluster=_cluster(fields.get("cluster"), measured),
        iteration_s=None if iteration_s is None else _number("iteration_s", iteration_s),
        profile=measured,
        checkpointing=_made(Checkpointing, "checkpointing", _section(fields, "checkpointing")),
        failures=_made(Failures, "failures", failures),
        run=_made(Run, "run", _section(fields, "run")),
    )


def _job(stem: str, model: dict[str, Any], parallel: dict[str, Any]) -> JobShape:
    name = str(model.pop("name", stem))
    regime = precision.parse(str(model.pop("regime", "mixed")), _scaling(model.pop("fp8_scaling", "tensor")))
    batch: dict[str, Any] = {key: model.pop(key) for key in ("global_batch_size", "micro_batch_size") if key in model}
    latent = model.pop("multi_latent_attention", None)
    if latent is not None:
        model["multi_latent_attention"] = _made(MultiLatentAttention, "job.multi_latent_attention", latent)
    layout: dict[str, Any] = {**parallel, **batch}
    return describe(name, _made(Transformer, "job", model), _made(Layout, "parallel", layout), regime)


def _scaling(value: object) -> Scaling:
    try:
        return Scaling(str(value))
    except ValueError:
        raise ConfigError(f"fp8_scaling {value!r}; needs one of {', '.join(Scaling)}") from None


_CLUSTER_UNITS = {
    "d2h": ("d2h_bytes_per_s", GB), "network": ("network_bytes_per_s", GB), "storage": ("storage_bytes_per_s", GB),
    "nvlink": ("link_bytes_per_s", GB), "memory": ("memory_bytes_per_s", GB), "host_memory": ("host_memory_bytes", GB),
    "tflops": ("flops", 1e12), "gpus_per_node": ("gpus_per_node", None), "network_share": ("network_share", None),
    "utilization": ("utilization", None), "overlap": ("overlap", None), "copies": ("copy_bytes_per_s", GB),
}  # fmt: skip


def _cluster(fields: object, measured: Profile | None) -> Cluster:
    """Return the cluster of a scenario, with the values in ``fields``.

    Values that ``fields`` lacks come from the preset cluster that ``fields`` names, or else from the measured profile.
    """
    if isinstance(fields, str):
        fields = {"preset": fields}
    if fields is None:
        fields = {}
    if not isinstance(fields, Mapping):
        raise ConfigError(f"cluster {fields!r}; needs a preset's name or fields")
    _refuse_unknown("cluster.", fields, {"preset", "speeds", *_CLUSTER_UNITS})
    values: dict[str, Any] = {
        name: _number(f"cluster.{key}", fields[key]) * (factor or 1)
        for key, (name, factor) in _CLUSTER_UNITS.items()
        if key in fields
    }
    if "gpus_per_node" in values:
        values["gpus_per_node"] = _converted("cluster.gpus_per_node", "int", values["gpus_per_node"])
    speeds = fields.get("speeds", ())
    try:
        pairs = tuple((float(speed), int(count)) for speed, count in speeds)
    except (TypeError, ValueError):
        raise ConfigError(f"cluster.speeds {speeds!r}; needs pairs of a speed and a number of nodes") from None
    base: Cluster | None = measured.cluster if measured is not None else None
    if (preset := fields.get("preset")) is not None:
        if preset not in CLUSTERS:
            raise ConfigError(f"cluster {preset!r}; needs one of {', '.join(CLUSTERS)}, or fields")
        base = CLUSTERS[str(preset)]
    if base is None:
        missing = [key for key in ("gpus_per_node", "d2h", "network") if key not in fields]
        if missing:
            raise ConfigError(f"cluster without {', '.join(missing)}; give these fields, a preset or a profile")
        base = Cluster(1, 1.0, 1.0)
    if pairs:
        values["speeds"] = pairs
    values.setdefault("network_share", ASSUMED_SHARE)
    return replace(base, **values)


def _section(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = fields.get(name, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name} {section!r}; needs fields and values")
    return dict(section)


def _made[Made](kind: type[Made], where: str, values: object) -> Made:
    """Return an instance of a dataclass with the values of a file, converted to the annotated types of the fields."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} {values!r}; needs fields and values")
    declared = {spec.name: spec for spec in dataclasses.fields(kind)}  # type: ignore[arg-type]
    _refuse_unknown(f"{where}.", values, set(declared))
    missing = [
        name for name, spec in declared.items()
        if spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING and name not in values
    ]  # fmt: skip
    if missing:
        raise ConfigError(f"{where} without {', '.join(missing)}; give these fields")
    return kind(
        **{name: _converted(f"{where}.{name}", str(declared[name].type), value) for name, value in values.items()}
    )


def _converted(where: str, kind: str, value: Any) -> Any:
    if value is None or dataclasses.is_dataclass(value):
        return value
    if kind.startswith("tuple"):
        each = "float" if "float" in kind else "int" if "int" in kind else "str"
        values = value if isinstance(value, list) else [value]
        return tuple(_converted(where, each, item) for item in values)
    if kind.startswith("str"):
        return str(value)
    if kind.startswith("bool"):
        if not isinstance(value, bool):
            raise ConfigError(f"{where} {value!r}; needs true or false")
        return value
    number = _number(where, value)
    if kind.startswith("int"):
        if not number.is_integer():
            raise ConfigError(f"{where} {value!r}; needs a whole number")
        return int(number)
    return number


def _number(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f"{where} {value!r}; needs a number")
    try:
        return float(value)  # because YAML reads 1e9 as a string
    except ValueError:
        raise ConfigError(f"{where} {value!r}; needs a number") from None


def _refuse_unknown(where: str, values: Mapping[Any, Any], known: set[str]) -> None:
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}{key} is not a known field; needs one of {', '.join(sorted(known))}")
