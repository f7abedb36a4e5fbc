"""Jobs of ``moevement simulate`` and ``advise``: scenario files, or models described by Megatron's flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from moevement_cli.examples import SCENARIOS as SCENARIOS
from moevement_cli.examples import scenario_path, scenarios
from moevement_cli.machines import overridden, preset
from moevement_cli.plan import config_path, input_of
from moevement_core import precision
from moevement_core.errors import ConfigError
from moevement_core.planning.cluster import ASSUMED_SHARE
from moevement_core.replication.protection import protection_of
from moevement_core.simulator import scenario
from moevement_core.simulator.failure_rate import mean_time_between_failures_s
from moevement_core.simulator.scenario import Scenario
from moevement_core.util.numbers import AT_LEAST_ONE, POSITIVE

MONTH_H = 720.0
SHORTEST_H = 12.0
FAILURES = 100
"""Expected number of failures in a simulated training of a model. It determines how long the training lasts.

The training lasts at least ``SHORTEST_H`` and at most ``MONTH_H`` hours.
"""


def scenarios_of(
    names: Sequence[str], arguments: argparse.Namespace, needs: Sequence[tuple[str, str]] = ()
) -> list[Scenario]:
    """Return the jobs that the command line names. Flags override the values of a scenario file.

    Args:
        names: names of scenarios or models.
        arguments: arguments of the command.
        needs: pairs of flags. The first of a pair has no effect without the second.

    Raises:
        ConfigError: a name is neither a scenario nor a model, or a flag would have no effect.
    """
    _check_flags(arguments, needs)
    return [_with_flags(job, arguments) for name in names for job in _scenarios(name, arguments)]


def _check_flags(arguments: argparse.Namespace, needs: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError for a flag that has no effect: another flag is missing, or another flag overrides it."""
    present = {name for name, value in vars(arguments).items() if value is not None}
    for flag, needed in needs:
        if flag in present and needed not in present:
            raise ConfigError(f"--{flag} without --{needed} has no effect; give --{needed}, or leave the flag out")
    if "trace" in present:
        for flag in ("mtbf", "weibull", "together", "seeds"):
            if flag in present:
                raise ConfigError(
                    f"--{flag} has no effect with --trace, because the trace lists the failures; leave one of them out"
                )
    if arguments.protection is not None:
        if arguments.replicas is not None:
            raise ConfigError("--protection and --replicas both set the number of copies; give only one of them")
        if protection_of("--protection", arguments.protection).parity is not None:
            raise ConfigError(
                f"--protection {arguments.protection}: parity is not simulated; give copies:R (moevement plan computes "
                "the memory that parity needs)"
            )


def _scenarios(name: str, arguments: argparse.Namespace) -> Iterator[Scenario]:
    path = scenario_path(name)
    counts = [arguments.ranks] if isinstance(arguments.ranks, int) else arguments.ranks or []
    if path is None:
        yield from (_of_model(name, count, arguments) for count in _ranks_of_model(name, counts, arguments))
        return
    if arguments.flags:
        raise ConfigError(
            f"{' '.join(arguments.flags)}: neither a flag of this command nor a field of {path.name}; to use "
            "Megatron's flags, give a model in place of the scenario"
        )
    for count in counts or [None]:
        yield _with_machines(scenario.load(path, ranks=count), arguments)


def _ranks_of_model(name: str, counts: Sequence[int], arguments: argparse.Namespace) -> Sequence[int]:
    try:
        config_path(name)
    except ConfigError as error:
        known = ", ".join(scenarios()) or "none, in this installation"
        raise ConfigError(f"{error}; scenarios are {known}") from None
    if not counts or arguments.iteration_time is None:
        raise ConfigError(f"{name} is a model, not a scenario; give --ranks and --iteration-time with it")
    for count in counts:
        AT_LEAST_ONE.check("--ranks", count)
    for mtbf_s in _mtbfs_s(arguments):
        POSITIVE.check("mtbf", mtbf_s)
    return counts


def _of_model(name: str, ranks: int, arguments: argparse.Namespace) -> Scenario:
    """Return the job that trains a model until :data:`FAILURES` failures are expected, but for a month at most.

    The training lasts at least :data:`SHORTEST_H` hours.
    """
    filled = {
        "model": name,
        "ranks": ranks,
        "windows_on_disk": False,
        "window_kind": arguments.window_kind or "aligned",
    }
    described = input_of(argparse.Namespace(**{**vars(arguments), **filled}))
    mtbfs_s = _mtbfs_s(arguments) or (mean_time_between_failures_s(ranks),)
    hours = min(MONTH_H, max(SHORTEST_H, FAILURES * max(mtbfs_s) / 3600))
    return Scenario(
        replace(described.job, regime=described.regime), described.cluster, described.iteration_s,
        failures=scenario.Failures(mtbf_s=mtbfs_s), run=scenario.Run(hours=hours),
    )  # fmt: skip


def _mtbfs_s(arguments: argparse.Namespace) -> tuple[float, ...]:
    if arguments.mtbf is None:
        return ()
    return tuple(arguments.mtbf) if isinstance(arguments.mtbf, list) else (arguments.mtbf,)


def _with_machines(job: Scenario, arguments: argparse.Namespace) -> Scenario:
    """Return the job of a scenario file with the machines and number formats that the command line gives."""
    regime = job.job.regime if arguments.regime is None else precision.parse(arguments.regime)
    if arguments.fp8_scaling is not None:
        regime = replace(regime, scaling=precision.Scaling(arguments.fp8_scaling))
    cluster = job.cluster
    if arguments.cluster is not None:
        cluster = replace(preset(arguments.cluster), network_share=ASSUMED_SHARE)
    return _changed(
        replace(job, job=replace(job.job, regime=regime), cluster=overridden(cluster, arguments)),
        iteration_s=arguments.iteration_time,
    )


def _with_flags(job: Scenario, arguments: argparse.Namespace) -> Scenario:
    """Return the job with the command line's values for checkpointing, failures, and simulated trainings."""
    replicas = arguments.replicas
    if arguments.protection is not None:
        replicas = protection_of("--protection", arguments.protection).replicas
    of = vars(arguments)
    return _changed(
        job,
        checkpointing=_changed(
            job.checkpointing, detect_s=of["detect"], regroup_s=of["regroup"], skew=of.get("skew"),
            interference=of["interference"], contention=of["contention"], replicas=replicas, window=of["window"],
            window_kind=of["window_kind"],
            keeps_own_copies=None if of["keep_own"] is None else of["keep_own"] != "never",
        ),
        failures=_changed(
            job.failures, mtbf_s=_mtbfs_s(arguments) or None, weibull=of.get("weibull"), together=of.get("together"),
            trace=None if of.get("trace") is None else str(of["trace"]), speedup=of.get("speedup"),
            spares=of["spares"], repair_s=of["repair"],
        ),
        run=_changed(
            job.run, strategies=None if of.get("strategy") is None else tuple(of["strategy"]), hours=of.get("hours"),
            seeds=of["seeds"], first_seed=of["first_seed"],
        ),
    )  # fmt: skip


def _changed[Given](base: Given, **values: Any) -> Given:
    """Return a copy of ``base``. Each of ``values`` that is not None replaces the field of the same name."""
    return replace(base, **{name: value for name, value in values.items() if value is not None})  # type: ignore[type-var]
