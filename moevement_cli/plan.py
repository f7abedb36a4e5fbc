"""``moevement plan``: what sparse checkpointing of a job will cost, as tables or as one JSON object."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moevement_cli.examples import EXAMPLES
from moevement_cli.machines import add_machines, cluster_of
from moevement_core import precision
from moevement_core.checkpoint_plan import CheckpointPlan, PlanInput, StagePlan
from moevement_core.description.cluster import GB
from moevement_core.engine.config import FEWEST_COPIES
from moevement_core.errors import ConfigError
from moevement_core.numbers import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE
from moevement_core.policy.window import WindowKind
from moevement_core.precision import Regime
from moevement_core.replication.protection import protection_of

PRESETS = EXAMPLES / "pretrain_moe" / "configs"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Its description and arguments."""
    parser.allow_abbrev = False
    parser.description = (
        "Say how many iterations a window needs and what it costs, from the model, the layout and the "
        "bandwidths, without starting anything. Megatron builds the model without memory, so every flag means what it "
        "means in a run; flags of Megatron's may stand among those below and win over the file's. docs/windows.md "
        "explains the numbers."
    )
    parser.add_argument("model", metavar="MODEL", help="a preset (gpt_moe, ...) or a .yaml of Megatron's flags")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="GPUs of the job")
    parser.add_argument(
        "--iteration-time", type=float, required=True, metavar="S", help="seconds that an iteration takes; measure one"
    )
    add_machines(parser)
    parser.add_argument(
        "--windows-on-disk",
        action="store_true",
        help="as with --moevement-persist-dir, for which a window more is kept",
    )
    parser.set_defaults(run=plan, flags=[])


def plan(arguments: argparse.Namespace) -> int:
    """Print the plan that ``arguments`` ask for; returns the exit code."""
    made = CheckpointPlan(input_of(arguments))
    console = Console()
    _print(made, console)
    if arguments.json:
        print(json.dumps(as_json(made)))
    return 0


def input_of(arguments: argparse.Namespace) -> PlanInput:
    """The job that the command line describes.

    Raises:
        ConfigError: it describes none.
    """
    cluster = cluster_of(arguments)  # before the model is built, which takes seconds
    asked = precision.parse(arguments.regime) if arguments.regime else None
    POSITIVE.check("--iteration-time", arguments.iteration_time)
    AT_LEAST_ONE.check("--ranks", arguments.ranks)
    AT_LEAST_ONE.check("--window", arguments.window)
    NOT_NEGATIVE.check("--replicas", arguments.replicas)
    from megatron.moevement.describe import describe

    path = config_path(arguments.model)
    job = describe(path.stem, ["--config", str(path), *arguments.flags], arguments.ranks)
    return PlanInput(
        job=job,
        cluster=cluster,
        regime=_regime(asked, arguments.fp8_scaling, job.regime),
        iteration_s=arguments.iteration_time,
        kind=WindowKind(arguments.window_kind),
        **protection_of_plan(arguments),
        window=arguments.window,
        to_disk=arguments.windows_on_disk,
    )


def protection_of_plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of the input of a plan: copies, or parity."""
    asked = protection_of("--protection", arguments.protection)
    if asked.parity is not None:
        return {"replicas": asked.parity.blocks, "members": asked.parity.members}
    replicas = arguments.replicas if asked.replicas is None else asked.replicas
    if arguments.keep_own == "never" and replicas < FEWEST_COPIES:
        raise ConfigError(
            f"--keep-own never with {replicas} copies of a snapshot; needs {FEWEST_COPIES} or more, or always"
        )
    return {"replicas": replicas, "keeps_own": arguments.keep_own != "never"}


def _regime(asked: Regime | None, scaling: str | None, own: Regime) -> Regime:
    """What is asked for; what is not, as the job's flags have it."""
    regime = replace(asked, scaling=own.scaling, gradient=own.gradient) if asked is not None else own
    if asked is not None and not asked.is_narrow:
        regime = replace(regime, step_bytes=own.step_bytes)
    return replace(regime, scaling=precision.Scaling(scaling)) if scaling is not None else regime


def config_path(model: str) -> Path:
    """The configuration file of a preset, or of a path."""
    for path in (Path(model), PRESETS / f"{model}.yaml"):
        if path.is_file():
            return path
    known = ", ".join(sorted(path.stem for path in PRESETS.glob("*.yaml"))) or "none, in this installation"
    raise ConfigError(f"{model!r} is no file and no preset; presets are {known}")


def _print(made: CheckpointPlan, console: Console) -> None:
    given, job, stage = made.given, made.given.job, made.binding_stage
    console.print(
        f"[bold]{job.name}[/bold] on {job.ranks} ranks ({job.layout}), regime {given.regime}, "
        f"{given.iteration_s:g} s an iteration, "
        + (f"parity:{given.members}+{given.replicas}" if given.members else f"{given.replicas} replicas")
    )
    console.print(
        f"budget of a rank: {_size(stage.budget.bytes)} an iteration, bound by [bold]{stage.budget.binding}[/bold] "
        f"(device to host {_size(stage.budget.d2h_bytes)} at {given.cluster.d2h_bytes_per_s / GB:g} GB/s"
        + (f" after {_size(stage.log_bytes)} of boundary log" if stage.log_bytes else "")
        + (
            f"; replication {_size(stage.budget.replication_bytes)} at "
            f"{given.cluster.replication_bytes_per_s / GB:g} GB/s to {given.replicas} peers)"
            if given.replicas
            else "; nothing is replicated)"
        )
    )
    console.print(
        f"[bold]W = {made.size}[/bold], {given.kind}"
        + (f", as asked (the smallest that fits is {_needed(made)})" if given.window else "")
        + f"; Algorithm 1 with equal operators and {given.cluster.d2h_bytes_per_s / GB:g} GB/s: "
        f"W = {made.paper_window.window}"
    )
    console.print(_stage_table(made))
    console.print(_slot_table(made))
    console.print(_cost_table(made))
    for line in _warnings(made):
        console.print(f"[bold]note[/bold] {line}")
    console.print(_alternatives_table(made))


def _needed(made: CheckpointPlan) -> int:
    return max(stage.own.size for stage in made.stages)


def _stage_table(made: CheckpointPlan) -> Table:
    table = Table(
        "stage", "operators", "parameters held", "full state", "of the heaviest rank", "compute weights", "W alone",
        title="one rank",
    )  # fmt: skip
    for number, stage in enumerate(made.stages):
        ranks = stage.shape.rank_bytes(made.given.regime)
        table.add_row(
            str(number) + (" *" if stage is made.binding_stage else ""), str(len(stage.table)),
            f"{sum(shape.parameters for shape in stage.shape.operators) / 1e6:,.1f} M", _size(stage.full_bytes),
            _size(max(rank.full for rank in ranks)) if ranks else "-", _size(stage.compute_bytes), str(stage.own.size),
        )  # fmt: skip
    return table


def _slot_table(made: CheckpointPlan) -> Table:
    stage = made.binding_stage
    table = Table(
        "slot", "full state of", "compute weights of", "bytes", "copy", "send", "of the iteration",
        title=f"slots of a rank of stage {made.stages.index(stage)}",
    )  # fmt: skip
    start = 0
    for slot, end in enumerate(stage.window.ends):
        held = int(stage.window.slot_bytes[0, slot])
        others = len(stage.table) - end + (start if made.given.kind is WindowKind.ROLLING else 0)
        slowest = max(stage.budget.copy_s(held), stage.budget.send_s(held))
        table.add_row(
            str(slot), f"{end - start} operators", f"{others} operators", _size(held),
            f"{stage.budget.copy_s(held):.3f} s", f"{stage.budget.send_s(held):.3f} s",
            f"{slowest / made.given.iteration_s:.0%}",
        )  # fmt: skip
        start = end
    return table


def _cost_table(made: CheckpointPlan) -> Table:
    given, dense = made.given, made.dense()
    per_s, replicas = given.iteration_s, given.replicas
    dense_average = dense.bytes / dense.interval / per_s
    dense_peak = min(dense.bytes / per_s, given.cluster.d2h_bytes_per_s)
    dense_sent_peak = replicas * dense.bytes / max(dense.send_s, per_s)
    dense_node = 2 * (1 + replicas) * dense.bytes * min(given.cluster.gpus_per_node, given.job.ranks)
    dense_column = (
        f"{dense.interval}", _size(dense.bytes), f"{dense.stall_s / dense.interval:.3f} s",
        _rates(dense_average, dense_peak), _rates(replicas * dense_average, dense_sent_peak),
        f"{dense.expected_rollback:.1f}", f"{dense.most_replayed}",
        f"{dense.fetch_s(given.cluster):.2f} s", f"{dense.expected_rollback * per_s:.1f} s", "-",
        _size(2 * dense.bytes), _size(2 * replicas * dense.bytes), "-", _size(dense_node),
    )  # fmt: skip
    table = Table("", "sparse, by replay", "by redo", "dense, same model and bandwidths", title="cost")
    for row in zip(_COSTS, _cost_column(made), _cost_column(made.redo()), dense_column, strict=True):
        table.add_row(*row)
    return table


_COSTS = (
    "window or interval, iterations", "bytes copied at once", "stall of an average iteration",
    "to the host, average and peak", "to the peers, average and peak", "expected rollback, iterations",
    "replayed at most, iterations", "recovery: fetch", "  iterations run again", "  updates made again",
    "host memory of a rank: own snapshots", "  what it keeps for peers", "  boundary logs", "host memory of a node",
)  # fmt: skip


def _cost_column(made: CheckpointPlan) -> Iterator[str]:
    per_s, replicas = made.given.iteration_s, made.given.replicas
    average, peak = _traffic(made)
    yield f"{made.size}" if made.is_carried else f"{made.size}, not carried"
    yield _size(peak * per_s)
    yield f"{made.stall_s:.3f} s"
    yield _rates(average, peak)
    yield _rates(replicas * average, replicas * peak)
    yield f"{made.expected_rollback:.1f}"
    yield f"{made.most_replayed}"
    yield f"{made.fetch_s:.2f} s"
    yield f"{made.expected_rollback * per_s:.1f} s"
    yield f"{made.updates_s:.2f} s" if made.updates_s else "-"
    for nbytes in made.host_memory:
        yield _size(nbytes)
    yield _size(made.host_memory_of_node)


def _rates(average: float, peak: float) -> str:
    return f"{_size(average)}/s, {_size(peak)}/s"


def _traffic(made: CheckpointPlan) -> tuple[float, float]:
    """Average and peak bytes per second that the heaviest rank copies to its host, logs left out."""
    slots = [stage.window.slot_bytes[0] for stage in made.stages]
    return (
        max(float(row.mean()) for row in slots) / made.given.iteration_s,
        max(float(row.max()) for row in slots) / made.given.iteration_s,
    )


def _warnings(made: CheckpointPlan) -> Iterator[str]:
    given = made.given
    for number, stage in enumerate(made.stages):
        if stage.window.over_budget:
            yield (
                f"stage {number}: slots {', '.join(map(str, stage.window.over_budget))} exceed the budget by up to "
                f"{_size(stage.window.peak_bytes - stage.budget.bytes)}: {_too_large(stage)}"
            )
    if made.stall_s:
        share = made.stall_s / given.iteration_s
        yield f"training stalls {made.stall_s:.3f} s in an average iteration ({share:.1%})"
    if made.behind_s:
        yield (
            f"replication falls behind by {made.behind_s:.2f} s a window, so windows will be abandoned; fewer "
            "replicas, a larger window or a faster network would hold"
        )
    if given.replicas and given.job.ranks <= given.cluster.gpus_per_node:
        yield "all ranks are on one node, so replicas are too: they survive a process and not the node"
    memory = given.cluster.host_memory_bytes
    if memory is not None and made.host_memory_of_node > memory:
        yield f"a node needs {_size(made.host_memory_of_node)} of host memory and has {_size(memory)}"


def _too_large(stage: StagePlan) -> str:
    if stage.window.size < len(stage.table):
        return "one operator alone is larger, or the window is shorter than it needs"
    return "even one operator in each slot is too much"


def _alternatives_table(made: CheckpointPlan) -> Table:
    table = Table("change", "W", title="what would change W")
    for what, size in made.alternatives():
        table.add_row(what, str(size))
    for size in _sizes_of_interest(made):
        rate = made.bandwidth_for(size)
        table.add_row(f"{_size(rate)}/s or more for each copy of a snapshot of a rank", str(size))
    return table


def _sizes_of_interest(made: CheckpointPlan) -> list[int]:
    return sorted({size for size in (*range(1, 7), made.size - 1, made.size) if size >= 1})


def _size(value: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}" if value < 1000 * factor else f"{value / factor:,.0f} {unit}"
    return f"{value:.0f} B"


def as_json(made: CheckpointPlan) -> dict[str, Any]:
    """Everything that the tables say, and the slots of every stage; bytes and seconds."""
    return _as_json(made) | {"redo": _as_json(made.redo())}


def _as_json(made: CheckpointPlan) -> dict[str, Any]:
    given, dense = made.given, made.dense()
    average, peak = _traffic(made)
    snapshots, replicas, logs = made.host_memory
    return {
        "model": given.job.name,
        "ranks": given.job.ranks,
        "layout": given.job.layout,
        "regime": str(given.regime),
        "iteration_s": given.iteration_s,
        "replicas": given.replicas,
        "parity_members": given.members,
        "keeps_own": given.keeps_own,
        "windows_on_disk": given.to_disk,
        "window": made.size,
        "window_kind": str(given.kind),
        "recovery": str(given.recovery),
        "is_carried": made.is_carried,
        "paper_window": made.paper_window.window,
        "budget_bytes": made.binding_stage.budget.bytes,
        "binding": made.binding_stage.budget.binding,
        "binding_stage": made.stages.index(made.binding_stage),
        "d2h_budget_bytes": made.binding_stage.budget.d2h_bytes,
        "replication_budget_bytes": made.binding_stage.budget.replication_bytes if given.replicas else None,
        "replication_lag": made.lag,
        "stall_s": made.stall_s,
        "replication_behind_s": made.behind_s,
        "expected_rollback": made.expected_rollback,
        "most_replayed": made.most_replayed,
        "traffic_bytes_per_s": {"average": average, "peak": peak},
        "host_memory_bytes": {
            "snapshots": snapshots, "replicas": replicas, "logs": logs, "node": made.host_memory_of_node,
        },
        "recovery_s": {
            "fetch": made.fetch_s, "run_again": made.expected_rollback * given.iteration_s, "updates": made.updates_s,
        },
        "stages": [_stage_as_json(stage, given.regime) for stage in made.stages],
        "dense": {
            "bytes": dense.bytes, "copy_s": dense.copy_s, "send_s": dense.send_s, "stall_s": dense.stall_s,
            "interval": dense.interval, "expected_rollback": dense.expected_rollback,
            "most_replayed": dense.most_replayed,
        },
        "alternatives": dict(made.alternatives()),
        "bandwidth_for_window": {str(size): made.bandwidth_for(size) for size in _sizes_of_interest(made)},
    }  # fmt: skip


def _stage_as_json(stage: StagePlan, regime: Regime) -> dict[str, Any]:
    ends = stage.window.ends
    return {
        "operators": len(stage.table),
        "full_bytes": stage.full_bytes,
        "compute_bytes": stage.compute_bytes,
        "log_bytes": stage.log_bytes,
        "ranks": [
            {"full_bytes": rank.full, "compute_bytes": rank.compute, "gradient_bytes": rank.gradient}
            for rank in stage.shape.rank_bytes(regime)
        ],
        "window_alone": stage.own.size,
        "slot_operators": [end - start for start, end in zip((0, *ends), ends, strict=False)],
        "slot_bytes": stage.window.slot_bytes[0].tolist(),
        "over_budget": list(stage.window.over_budget),
    }
