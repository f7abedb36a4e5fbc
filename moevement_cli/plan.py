"""Command ``moevement plan``, which computes what sparse checkpointing of a job will cost."""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moevement_cli.examples import EXAMPLES, SCENARIOS, scenarios
from moevement_cli.machines import add_machines, cluster_of, copies_get
from moevement_cli.units import METAVAR, seconds
from moevement_cli.waiting import waiting
from moevement_core import precision
from moevement_core.engine.config import FEWEST_COPIES
from moevement_core.errors import ConfigError
from moevement_core.planning.alternatives import alternatives, bandwidth_for
from moevement_core.planning.checkpoint_plan import CheckpointPlan, PlanInput, StagePlan
from moevement_core.planning.cluster import GB
from moevement_core.planning.dense_plan import DensePlan, dense_plan
from moevement_core.planning.job import JobShape
from moevement_core.planning.planned_memory import PlannedMemory
from moevement_core.policy.schedule import LAG_ALLOWANCE
from moevement_core.policy.window import WindowKind
from moevement_core.precision import Regime
from moevement_core.replication.protection import protection_of
from moevement_core.simulator import scenario
from moevement_core.util.extras import is_installed, require
from moevement_core.util.numbers import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE

PRESETS = EXAMPLES / "pretrain_moe" / "configs"
CHECK_FAILED = 1
DEFAULT_REPLICAS = 2


def add_to(parser: argparse.ArgumentParser) -> None:
    """Set the description and arguments of ``moevement plan``."""
    parser.allow_abbrev = False
    parser.description = (
        "Compute how many iterations a window needs and what it costs, from the model, the layout and the "
        "bandwidths. No training starts. Megatron builds the model without allocating memory, so every flag means the "
        "same as in a run. You can add flags of Megatron; they override those in the file. docs/sizing.md explains "
        "the numbers."
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a .yaml file of Megatron's flags, or a preset: {', '.join(presets()) or 'none here'}",
    )
    parser.add_argument("--list", action=ListPresets, nargs=0, help="list the presets with their descriptions and exit")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="GPUs of the job")
    parser.add_argument(
        "--iteration-time", type=seconds, required=True, metavar=METAVAR,
        help="time of an iteration without saving, such as 2.5s, as measured",
    )  # fmt: skip
    add_machines(parser)
    parser.add_argument(
        "--windows-on-disk",
        action="store_true",
        help="plan for --moevement-persist-dir: host memory holds one more window, which is being written to disk",
    )
    parser.add_argument(
        "--check", action="store_true",
        help="exit with code 1 if host memory does not suffice or copies fall behind; needs --host-memory",
    )  # fmt: skip
    parser.set_defaults(run=plan, flags=[])


class ListPresets(argparse.Action):
    """Flag that lists the presets and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the name and first sentence of each preset, and end the command."""
        for name in presets():
            print(f"{name:14} {_first_sentence(config_path(name))}")
        parser.exit()


def presets() -> list[str]:
    """Return the names of the models that come with the installation."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def _first_sentence(path: Path) -> str:
    """Return the first sentence of the comment at the head of a preset."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return re.split(r"[.:;] ", " ".join(line.lstrip("# ") for line in lines))[0].rstrip(".")


def plan(arguments: argparse.Namespace) -> int:
    """Print the plan of the job, and return the exit code."""
    checkpoints = CheckpointPlan(input_of(arguments))
    if arguments.check and checkpoints.inputs.cluster.host_memory_bytes is None:
        raise ConfigError("--check without --host-memory: the memory of a node is not known; give --host-memory GB")
    console = Console()
    _print(checkpoints, console)
    if arguments.json:
        print(json.dumps(as_json(checkpoints)))
    return CHECK_FAILED if arguments.check and not (fits(checkpoints) and checkpoints.is_carried) else 0


def fits(plan: CheckpointPlan) -> bool:
    """Return True if a node has enough host memory, or if its memory is not known."""
    memory = plan.inputs.cluster.host_memory_bytes
    return memory is None or PlannedMemory(plan).of_node <= memory


def input_of(arguments: argparse.Namespace) -> PlanInput:
    """Return the job that the command line describes.

    Raises:
        ConfigError: a flag of the command line is missing, out of range, or contradicts another flag.
    """
    path = config_path(arguments.model)
    POSITIVE.check("--iteration-time", arguments.iteration_time)
    AT_LEAST_ONE.check("--ranks", arguments.ranks)
    AT_LEAST_ONE.check("--window", arguments.window)
    NOT_NEGATIVE.check("--replicas", arguments.replicas)
    cluster = cluster_of(arguments)
    asked = precision.parse(arguments.regime) if arguments.regime else None
    protection = protection_of_plan(arguments)
    job = _described(path, arguments)
    return PlanInput(
        job=job,
        cluster=cluster,
        regime=_regime(asked, arguments.fp8_scaling, job.regime),
        iteration_s=arguments.iteration_time,
        kind=WindowKind(arguments.window_kind),
        **protection,
        window=arguments.window,
        to_disk=arguments.windows_on_disk,
    )


def _described(path: Path, arguments: argparse.Namespace) -> JobShape:
    """Return the shape of the job, from Megatron or, without Megatron, from the scenario of the same name.

    Raises:
        MissingPackage: Megatron is not installed, and flags or a file of Megatron describe the job.
    """
    fields = SCENARIOS / path.name
    if not is_installed("megatron.core") and path.parent == PRESETS and fields.is_file() and not arguments.flags:
        print(f"moevement: without megatron-core, the sizes of {path.stem} come from the model in {fields.name}")
        return scenario.load(fields, ranks=arguments.ranks).job
    known = ", ".join(name for name in presets() if name in scenarios())
    require("megatron.core", f"moevement plan {arguments.model}", f"give one of {known}, without its flags")
    with waiting(f"Megatron builds {path.stem} for {arguments.ranks} ranks, stage by stage, without memory"):
        from megatron.moevement.describe import describe

        return describe(path.stem, ["--config", str(path), *arguments.flags], arguments.ranks)


def protection_of_plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a plan's input that describe the protection of snapshots: copies or parity."""
    asked = protection_of("--protection", arguments.protection)
    if arguments.protection is not None and arguments.replicas is not None:
        raise ConfigError("--protection and --replicas both set how snapshots are protected; give only one of them")
    if asked.parity is not None:
        if arguments.keep_own == "never":
            raise ConfigError(
                "--keep-own never with parity: survivors need their own snapshots to rebuild lost ones; leave "
                "--keep-own out"
            )
        return {"replicas": asked.parity.blocks, "members": asked.parity.members}
    replicas = asked.replicas if arguments.replicas is None else arguments.replicas
    replicas = DEFAULT_REPLICAS if replicas is None else replicas
    if arguments.keep_own == "never" and replicas < FEWEST_COPIES:
        raise ConfigError(
            f"--keep-own never with {replicas} copies of a snapshot; give {FEWEST_COPIES} or more copies, or "
            "--keep-own always"
        )
    return {"replicas": replicas, "keeps_own_copies": arguments.keep_own != "never"}


def _regime(asked: Regime | None, scaling: str | None, own: Regime) -> Regime:
    """Return the number formats of the state: those of the command line, completed by the job's own formats."""
    regime = replace(asked, scaling=own.scaling, gradient=own.gradient) if asked is not None else own
    if asked is not None and not asked.is_narrow:
        regime = replace(regime, step_bytes=own.step_bytes)
    return replace(regime, scaling=precision.Scaling(scaling)) if scaling is not None else regime


def config_path(model: str) -> Path:
    """Return the configuration file that ``model`` names, as a path or as a preset."""
    for path in (Path(model), PRESETS / f"{model}.yaml"):
        if path.is_file():
            return path
    known = ", ".join(presets()) or "none, in this installation"
    raise ConfigError(f"{model!r} is neither a file nor a preset; presets are {known}")


def _print(checkpoints: CheckpointPlan, console: Console) -> None:
    inputs, job = checkpoints.inputs, checkpoints.inputs.job
    console.print(
        f"[bold]{job.name}[/bold] on {job.ranks} ranks ({job.layout}), regime {inputs.regime}, "
        f"{inputs.iteration_s:g} s an iteration, "
        + (
            f"parity:{inputs.members}+{inputs.replicas}"
            if inputs.members
            else f"{inputs.replicas} copies on other nodes"
        )
    )
    console.print(_window_sentence(checkpoints))
    console.print(_memory_sentence(checkpoints))
    for line in _warnings(checkpoints):
        console.print(f"[bold red]warning[/bold red] {line}")
    console.print(_budget_sentence(checkpoints))
    console.print(_stage_table(checkpoints))
    if checkpoints.size > 1:
        console.print(_slot_table(checkpoints))
    console.print(_cost_table(checkpoints))
    _print_alternatives(checkpoints, console)


def _window_sentence(checkpoints: CheckpointPlan) -> str:
    inputs = checkpoints.inputs
    size = f"[bold]Window: {checkpoints.size} iteration{'s' if checkpoints.size > 1 else ''}[/bold], {inputs.kind}"
    if inputs.window:
        size += f", as requested; the smallest that fits is {max(stage.own.size for stage in checkpoints.stages)}"
    if checkpoints.size > 1:
        return f"{size}. Every iteration saves a part of the state. {checkpoints.size} iterations save all of it once."
    rarer = _rarer(checkpoints)
    node, dense_node = PlannedMemory(checkpoints).of_node, sum(rarer.host_memory) * checkpoints.inputs.ranks_of_node
    sentence = f"{size}. One snapshot holds everything, so sparse checkpoints are no better than dense ones here."
    if dense_node >= node:
        return sentence
    return (
        f"{sentence} Sparse checkpoints take {_size(node)} per node. --moevement-strategy dense "
        f"--moevement-dense-interval {rarer.interval} takes {_size(dense_node)}, and replays "
        f"{rarer.average_replayed:.1f} iterations on average instead of {checkpoints.average_replayed:.1f}."
    )


def _memory_sentence(checkpoints: CheckpointPlan) -> str:
    needed, memory = _size(PlannedMemory(checkpoints).of_node), checkpoints.inputs.cluster.host_memory_bytes
    if memory is None:
        return f"Host memory: {needed} per node; give --host-memory GB to compare this with the memory of a node."
    if fits(checkpoints):
        return f"[green]Host memory: fits[/green], {needed} of {_size(memory)}."
    return (
        f"[bold red]Host memory: does not fit[/bold red], {needed} of {_size(memory)}. Try --keep-own never, "
        "--protection parity:G+M, or --replicas with fewer copies."
    )


def _budget_sentence(checkpoints: CheckpointPlan) -> str:
    inputs, budget, logged = checkpoints.inputs, checkpoints.binding_stage.budget, checkpoints.binding_stage.log_bytes
    sentence = (
        f"A rank can save {_size(budget.bytes)} an iteration, limited by [bold]{budget.binding}[/bold]: "
        f"{_size(budget.d2h_bytes)} from device to host at {inputs.cluster.d2h_bytes_per_s / GB:g} GB/s"
        + (f", after {_size(logged)} of boundary log" if logged else "")
    )
    if not inputs.replicas:
        return f"{sentence}; nothing goes to peers."
    return f"{sentence}; {_size(budget.replication_bytes)} to {inputs.replicas} peers: {copies_get(inputs.cluster)}."


def _stage_table(checkpoints: CheckpointPlan) -> Table:
    table = Table(
        "stage", "operators", "parameters held", "full state", "full state, heaviest rank", "compute weights", "window",
        title="one rank",
    )  # fmt: skip
    for number, stage in enumerate(checkpoints.stages):
        ranks = stage.shape.rank_bytes(checkpoints.inputs.regime)
        table.add_row(
            str(number) + (" *" if stage is checkpoints.binding_stage else ""), str(len(stage.table)),
            f"{sum(shape.parameters for shape in stage.shape.operators) / 1e6:,.1f} M", _size(stage.full_bytes),
            _size(max(rank.full for rank in ranks)) if ranks else "-", _size(stage.compute_bytes), str(stage.own.size),
        )  # fmt: skip
    return table


def _slot_table(checkpoints: CheckpointPlan) -> Table:
    stage = checkpoints.binding_stage
    table = Table(
        "slot", "full state of", "compute weights of", "bytes", "copy", "send", "share of iteration",
        title=f"slots of a rank of stage {checkpoints.stages.index(stage)}",
    )  # fmt: skip
    start = 0
    for slot, end in enumerate(stage.window.ends):
        held = int(stage.window.slot_bytes[0, slot])
        others = len(stage.table) - end + (start if checkpoints.inputs.kind is WindowKind.ROLLING else 0)
        slowest = max(stage.budget.copy_s(held), stage.budget.send_s(held))
        table.add_row(
            str(slot), f"{end - start} operators", f"{others} operators", _size(held),
            f"{stage.budget.copy_s(held):.3f} s", f"{stage.budget.send_s(held):.3f} s",
            f"{slowest / checkpoints.inputs.iteration_s:.0%}",
        )  # fmt: skip
        start = end
    return table


def _cost_table(checkpoints: CheckpointPlan) -> Table:
    inputs = checkpoints.inputs
    dense = dense_plan(checkpoints) if checkpoints.size > 1 else _rarer(checkpoints)
    per_s, replicas = inputs.iteration_s, inputs.replicas
    dense_average = dense.bytes / dense.interval / per_s
    dense_peak = min(dense.bytes / per_s, inputs.cluster.d2h_bytes_per_s)
    dense_sent_peak = replicas * dense.bytes / max(dense.send_s, per_s)
    dense_column = (
        f"{dense.interval}", _size(dense.bytes), f"{dense.stall_s / dense.interval:.3f} s",
        _rates(dense_average, dense_peak), _rates(replicas * dense_average, dense_sent_peak),
        f"{dense.average_replayed:.1f}", f"{dense.most_replayed}",
        f"{inputs.cluster.fetch_s(dense.bytes):.2f} s", f"{dense.expected_rollback * per_s:.1f} s", "-",
        *map(_size, dense.host_memory), _size(sum(dense.host_memory) * inputs.ranks_of_node),
    )  # fmt: skip
    if checkpoints.size == 1:
        table = Table("", "everything, every iteration", f"dense, every {dense.interval}", title="cost")
        columns: list[Iterable[str]] = [_cost_column(checkpoints), dense_column]
    else:
        table = Table("", "sparse, by replay", "by redo", "dense", title="cost")
        columns = [_cost_column(checkpoints), _cost_column(checkpoints.redo()), dense_column]
    for row in zip(_COSTS, *columns, strict=True):
        table.add_row(*row)
    return table


def _rarer(checkpoints: CheckpointPlan) -> DensePlan:
    """Return the plan of dense checkpoints at the shortest interval at which a rank keeps at most two checkpoints."""
    return dense_plan(checkpoints, LAG_ALLOWANCE + 2)


_COSTS = (
    "window or interval, iterations", "bytes copied at once", "stall of an average iteration",
    "to the host, average and peak", "to the peers, average and peak", "iterations replayed on average",
    "iterations replayed at most", "recovery: fetch", "  replay, and half an interrupted iteration",
    "  updates repeated", "host memory of a rank: own snapshots", "  snapshots of peers", "  boundary logs",
    "host memory of a node",
)  # fmt: skip


def _cost_column(checkpoints: CheckpointPlan) -> Iterator[str]:
    per_s, replicas, memory = checkpoints.inputs.iteration_s, checkpoints.inputs.replicas, PlannedMemory(checkpoints)
    average, peak = _traffic(checkpoints)
    yield f"{checkpoints.size}" if checkpoints.is_carried else f"{checkpoints.size}, falls behind"
    yield _size(peak * per_s)
    yield f"{checkpoints.stall_s:.3f} s"
    yield _rates(average, peak)
    yield _rates(replicas * average, replicas * peak)
    yield f"{checkpoints.average_replayed:.1f}"
    yield f"{checkpoints.most_replayed}"
    yield f"{checkpoints.inputs.cluster.fetch_s(checkpoints.window_bytes):.2f} s"
    yield f"{checkpoints.expected_rollback * per_s:.1f} s"
    yield f"{checkpoints.updates_s:.2f} s" if checkpoints.updates_s else "-"
    for nbytes in memory.of_rank:
        yield _size(nbytes)
    yield _size(memory.of_node)


def _rates(average: float, peak: float) -> str:
    return f"{_size(average)}/s, {_size(peak)}/s"


def _traffic(checkpoints: CheckpointPlan) -> tuple[float, float]:
    """Return the bytes of snapshots that a rank copies to its host per second: average over a window, and peak.

    The rank is the one that copies most. Boundary logs are not included.
    """
    slots = [stage.window.slot_bytes[0] for stage in checkpoints.stages]
    return (
        max(float(row.mean()) for row in slots) / checkpoints.inputs.iteration_s,
        max(float(row.max()) for row in slots) / checkpoints.inputs.iteration_s,
    )


def _warnings(checkpoints: CheckpointPlan) -> Iterator[str]:
    inputs = checkpoints.inputs
    for number, stage in enumerate(checkpoints.stages):
        if stage.window.over_budget:
            yield (
                f"stage {number}: slots {', '.join(map(str, stage.window.over_budget))} exceed the budget by up to "
                f"{_size(stage.window.peak_bytes - stage.budget.bytes)}: {_too_large(stage)}"
            )
    if checkpoints.stall_s:
        share = checkpoints.stall_s / inputs.iteration_s
        yield f"training stalls {checkpoints.stall_s:.3f} s in an average iteration ({share:.1%})"
    if checkpoints.behind_s:
        yield (
            f"replication falls behind by {checkpoints.behind_s:.2f} s a window, so windows will be abandoned; use "
            "fewer replicas, a larger window or a faster network"
        )
    if inputs.replicas and inputs.job.ranks <= inputs.cluster.gpus_per_node:
        yield "all ranks and their replicas are on one node: replicas survive the loss of a process, not of the node"


def _too_large(stage: StagePlan) -> str:
    if stage.window.size < len(stage.table):
        return "one operator is larger than the budget, or the window is too short"
    return "even a slot of one operator is too large"


def _print_alternatives(checkpoints: CheckpointPlan, console: Console) -> None:
    changes = [(what, size) for what, size in alternatives(checkpoints.inputs) if size != checkpoints.size]
    if not changes:
        console.print(
            "Twice the bandwidth, another kind of window, one copy less or another number format would not change the "
            "window."
        )
        return
    table = Table("change", "window", title="what would change the window")
    for what, size in changes:
        table.add_row(what, str(size))
    for size in _sizes_of_interest(checkpoints):
        table.add_row(f"at least {_size(bandwidth_for(checkpoints, size))}/s per rank and copy", str(size))
    console.print(table)


def _sizes_of_interest(checkpoints: CheckpointPlan) -> list[int]:
    return sorted({size for size in (*range(1, 7), checkpoints.size - 1, checkpoints.size) if size >= 1})


def _size(value: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}" if value < 1000 * factor else f"{value / factor:,.0f} {unit}"
    return f"{value:.0f} B"


def as_json(plan: CheckpointPlan) -> dict[str, Any]:
    """Return all printed numbers and the slots of every stage as plain data, in bytes and seconds."""
    return _as_json(plan) | {"redo": _as_json(plan.redo())}


def _as_json(checkpoints: CheckpointPlan) -> dict[str, Any]:
    inputs, dense, memory = checkpoints.inputs, dense_plan(checkpoints), PlannedMemory(checkpoints)
    average, peak = _traffic(checkpoints)
    snapshots, replicas, logs = memory.of_rank
    return {
        "model": inputs.job.name,
        "ranks": inputs.job.ranks,
        "layout": inputs.job.layout,
        "regime": str(inputs.regime),
        "iteration_s": inputs.iteration_s,
        "replicas": inputs.replicas,
        "parity_members": inputs.members,
        "keeps_own_copies": inputs.keeps_own_copies,
        "windows_on_disk": inputs.to_disk,
        "window": checkpoints.size,
        "window_kind": str(inputs.kind),
        "recovery": str(inputs.recovery),
        "is_carried": checkpoints.is_carried,
        "paper_window": checkpoints.paper_window.window,
        "budget_bytes": checkpoints.binding_stage.budget.bytes,
        "binding": checkpoints.binding_stage.budget.binding,
        "binding_stage": checkpoints.stages.index(checkpoints.binding_stage),
        "d2h_budget_bytes": checkpoints.binding_stage.budget.d2h_bytes,
        "replication_budget_bytes": checkpoints.binding_stage.budget.replication_bytes if inputs.replicas else None,
        "replication_lag": checkpoints.lag,
        "stall_s": checkpoints.stall_s,
        "replication_behind_s": checkpoints.behind_s,
        "expected_rollback": checkpoints.expected_rollback,
        "average_replayed": checkpoints.average_replayed,
        "most_replayed": checkpoints.most_replayed,
        "traffic_bytes_per_s": {"average": average, "peak": peak},
        "host_memory_bytes": {
            "snapshots": snapshots, "replicas": replicas, "logs": logs, "node": memory.of_node,
        },
        "recovery_s": {
            "fetch": inputs.cluster.fetch_s(checkpoints.window_bytes),
            "run_again": checkpoints.expected_rollback * inputs.iteration_s,
            "updates": checkpoints.updates_s,
        },
        "stages": [_stage_as_json(stage, inputs.regime) for stage in checkpoints.stages],
        "dense": {
            "bytes": dense.bytes, "copy_s": dense.copy_s, "send_s": dense.send_s, "stall_s": dense.stall_s,
            "interval": dense.interval, "expected_rollback": dense.expected_rollback,
            "average_replayed": dense.average_replayed, "most_replayed": dense.most_replayed,
            "host_memory_of_node_bytes": sum(dense.host_memory) * inputs.ranks_of_node,
        },
        "fits": fits(checkpoints) if inputs.cluster.host_memory_bytes is not None else None,
        "alternatives": dict(alternatives(checkpoints.inputs)),
        "bandwidth_for_window": {
            str(size): bandwidth_for(checkpoints, size) for size in _sizes_of_interest(checkpoints)
        },
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
