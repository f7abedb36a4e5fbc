"""Command ``moevement profile``, which measures the parts of an iteration for ``moevement simulate``."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moevement_cli.bench_run import failed, launch
from moevement_cli.outputs import check_output
from moevement_core.errors import ConfigError
from moevement_core.overhead.fields import recorded_overhead
from moevement_core.planning.profile import Affine, Profile, SizeProfile, StageProfile
from moevement_core.run.run_record import RunRecord
from moevement_core.simulator.pipeline import SimulatedPipeline
from moevement_core.util.numbers import AT_LEAST_ONE

FEWEST = 8
SAVING = 48
"""Default iterations of the training with checkpoints. A confidence interval needs 28 iterations."""
FEWEST_SAVING = 16
SWITCH = "--moevement-sparse-ckpt"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the description and arguments of ``moevement profile``."""
    parser.description = (
        "Train SCRIPT for a few iterations and write a profile: times of the forward and backward pass of each stage, "
        "of synchronisation and of the update, memory of a layer, bandwidths of copies and storage, and times of "
        "collectives by message size. Then train SCRIPT with checkpoints, and add to the profile how much copies to "
        "peers lengthen an iteration. A scenario with 'profile: FILE' is simulated with this profile."
    )
    parser.add_argument("--nproc", type=int, required=True, metavar="N", help="ranks on this host")
    parser.add_argument(
        "--iterations", type=int, default=16, metavar="K", help="iterations, half of them with timers (default: 16)"
    )
    parser.add_argument(
        "--saving-iterations", type=int, default=SAVING, metavar="K",
        help=f"iterations of the training with checkpoints; 0 leaves that training out (default: {SAVING})",
    )  # fmt: skip
    parser.add_argument(
        "--micro-batch-sizes", type=int, nargs="+", metavar="B", help="micro-batch sizes to measure (default: SCRIPT's)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("profile.yaml"),
        metavar="FILE",
        help="file to write (default: profile.yaml)",
    )
    parser.add_argument(
        "--storage", type=Path, metavar="DIR", help="folder on the storage to measure (default: a temporary folder)"
    )
    parser.add_argument("script", metavar="SCRIPT", help="training script")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of SCRIPT")
    parser.set_defaults(run=profile)


def profile(arguments: argparse.Namespace) -> int:
    """Measure a profile, write and print it, and return the exit code."""
    if arguments.nproc < 1 or arguments.iterations < FEWEST:
        raise ConfigError(
            f"--nproc {arguments.nproc} --iterations {arguments.iterations}; give --nproc 1 or more, and --iterations "
            f"{FEWEST} or more, because the first iterations warm up and the others alternate between timers on and off"
        )
    if arguments.saving_iterations and arguments.saving_iterations < FEWEST_SAVING:
        raise ConfigError(
            f"--saving-iterations {arguments.saving_iterations}; give {FEWEST_SAVING} or more, to compare iterations "
            "with and without copies, or 0 to leave the comparison out"
        )
    for size in arguments.micro_batch_sizes or ():
        AT_LEAST_ONE.check("--micro-batch-sizes", size)
    if not Path(arguments.script).is_file():
        raise ConfigError(f"{arguments.script}: no such training script; give its path after the options")
    if arguments.storage is not None and arguments.storage.exists() and not arguments.storage.is_dir():
        raise ConfigError(f"--storage {arguments.storage} is no folder; give a folder on the storage to measure")
    check_output("--output", arguments.output)
    measured = profile_of([_run(arguments, size) for size in arguments.micro_batch_sizes or (None,)])
    if arguments.saving_iterations:
        measured = replace(measured, contention=_contention(arguments, measured))
    measured.save(arguments.output)
    _print(measured, Console())
    print(f"profile: {arguments.output}")
    return 0


def _run(arguments: argparse.Namespace, micro_batch_size: int | None) -> dict[str, Any]:
    from megatron.moevement.bench import profile as script
    from megatron.moevement.bench.observed import OUTPUT_ENV

    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            OUTPUT_ENV: folder,
            script.ITERATIONS_ENV: str(arguments.iterations),
            script.STORAGE_ENV: str((arguments.storage or Path(folder)).absolute()),
        }
        # These flags leave checkpoints out, because the timers would count snapshots as a part of training.
        flags = [*_flags(arguments, arguments.iterations, micro_batch_size), "--timing-log-level", "2"]
        launch(arguments.nproc, [str(script.__file__), arguments.script, *flags], Path(folder, "run"))
        samples = Path(folder, "samples.json")
        if not samples.exists():
            raise failed(0, Path(folder, "run"))
        return dict(json.loads(samples.read_text(encoding="utf-8")))


def _flags(arguments: argparse.Namespace, iterations: int, micro_batch_size: int | None) -> list[str]:
    """Return the script's flags for a training of ``iterations`` iterations without checkpoints."""
    from moevement_core.launching import config_file

    flags = [word for word in config_file.expand(arguments.arguments) if word != SWITCH]
    flags += ["--train-iters", str(iterations), "--eval-iters", "0", "--log-interval", "1"]
    return [*flags, "--micro-batch-size", str(micro_batch_size)] if micro_batch_size is not None else flags


def _contention(arguments: argparse.Namespace, profile: Profile) -> float | None:
    """Train with checkpoints, and return :attr:`Profile.contention`, the slow-down of training by copies to peers.

    The same training has iterations with and without copies, so machine and load are the same for both. Return None if
    the training measured no overhead, or sent nothing to peers.
    """
    size = next(iter(arguments.micro_batch_sizes or ()), None)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        flags = [*_flags(arguments, arguments.saving_iterations, size), SWITCH]
        launch(arguments.nproc, [arguments.script, *flags], run_dir)
        return contention_of(RunRecord(run_dir).metrics(), profile)


def contention_of(lines: Sequence[Mapping[str, Any]], profile: Profile) -> float | None:
    """Return the value of :attr:`Profile.contention` that a training with checkpoints measured.

    Return None if the training measured no overhead, or sent nothing to peers.

    Args:
        lines: metrics of the training with checkpoints, one line for each iteration.
        profile: profile of the same training without checkpoints.
    """
    measured = next((overhead for line in reversed(lines) if (overhead := recorded_overhead(line)) is not None), None)
    sent = statistics.fmean(line.get("replicated_bytes", 0) for line in lines) if lines else 0.0
    if measured is None or not sent:
        return None
    lengthened_s = (measured.parts["digest"] + measured.parts["send"]) * profile.sizes[0].iteration_s
    return max(0.0, lengthened_s / profile.cluster.link_s(sent))


def profile_of(runs: Sequence[Mapping[str, Any]]) -> Profile:
    """Return the profile that several runs measured, one run for each micro-batch size.

    Numbers that do not depend on the micro-batch size come from the first run.
    """
    first = runs[0]
    ranks: Sequence[Mapping[str, Any]] = first["ranks"]
    fits = [
        Affine.fit(
            series["collective"], series["ranks"], [(int(nbytes), seconds) for nbytes, seconds in series["samples"]]
        )
        for series in first["collectives"]
    ]
    send = next((fit for fit in fits if fit.collective == "send"), None)
    network = (len(ranks) // 2) / send.b_s_per_byte if send is not None and send.b_s_per_byte > 0 else 0.0
    return Profile(
        device=first["device"], backend=first["backend"], ranks=len(ranks), pipeline=first["pipeline"],
        chunks=first["chunks"],
        d2h_bytes_per_s=min(rank["d2h_bytes_per_s"] for rank in ranks),
        network_bytes_per_s=network,
        storage_bytes_per_s=sum(rank["storage_bytes_per_s"] for rank in ranks),
        cores=first["cores"], sizes=tuple(_size(run, send) for run in runs), collectives=tuple(fits),
        versions={name: version(name) for name in ("torch", "megatron-core")},
    )  # fmt: skip


def _size(run: Mapping[str, Any], send: Affine | None) -> SizeProfile:
    """Return medians over iterations for one micro-batch size. A stage has the times of its slowest rank."""
    ranks: Sequence[Mapping[str, Any]] = run["ranks"]
    count = run["micro_batches"]

    def median(rank: Mapping[str, Any], part: str) -> float:
        return statistics.median(rank["parts_s"][part])

    stages = []
    for number in range(run["pipeline"]):
        own = [rank for rank in ranks if rank["stage"] == number]
        stages.append(
            StageProfile(
                forward_s=max(median(rank, "forward") for rank in own) / count,
                backward_s=max(median(rank, "backward") for rank in own) / count,
                layers=own[0]["layers"]["count"],
                parameters=max(rank["parameters"] for rank in own),
                layer_activation_bytes=max(rank["layers"]["activation_bytes"] for rank in own),
                layer_output_bytes=max(rank["layers"]["output_bytes"] for rank in own),
            )
        )
    return SizeProfile(
        tokens=run["tokens"], micro_batches=count,
        iteration_s=max(statistics.median(rank["whole_s"]) for rank in ranks),
        sync_s=max(median(rank, "reduce") + median(rank, "gather") for rank in ranks),
        # The optimizer's timer includes the gathering of parameters.
        update_s=max(max(0.0, median(rank, "optimizer") - median(rank, "gather")) for rank in ranks),
        send_s=send.seconds(run["boundary_bytes"]) if send is not None else 0.0, stages=tuple(stages),
    )  # fmt: skip


def _print(profile: Profile, console: Console) -> None:
    console.print(f"{profile.ranks} ranks, {profile.backend} on {profile.device}")
    for size in profile.sizes:
        _print_size(profile, size, console)
    console.print(
        f"a rank copies {profile.d2h_bytes_per_s / 1e9:.3g} GB/s to its host; all ranks send "
        f"{profile.network_bytes_per_s / 1e9:.3g} GB/s and write "
        f"{profile.storage_bytes_per_s / 1e9:.3g} GB/s to storage"
    )
    if profile.contention is not None:
        console.print(
            f"copies to peers lengthen training by {profile.contention:.3g} s for each second that the copies would "
            "take on idle links"
        )
    fitted = Table("collective", "ranks", "a", "b", "1 MB")
    for fit in profile.collectives:
        fitted.add_row(
            fit.collective, str(fit.ranks), f"{1e6 * fit.a_s:.4g} us", f"{1e9 * fit.b_s_per_byte:.3g} ns/B",
            f"{1e3 * fit.seconds(1e6):.3g} ms",
        )  # fmt: skip
    console.print(fitted)


def _print_size(profile: Profile, size: SizeProfile, console: Console) -> None:
    table = Table("stage", "layers", "parameters of a rank", "forward", "backward", "layer activations", "layer output")
    for number, stage in enumerate(size.stages):
        table.add_row(
            str(number), str(stage.layers), f"{stage.parameters / 1e6:.3g} M", f"{1e3 * stage.forward_s:.3g} ms",
            f"{1e3 * stage.backward_s:.3g} ms", f"{stage.layer_activation_bytes / 1e6:.3g} MB",
            f"{stage.layer_output_bytes / 1e6:.3g} MB",
        )  # fmt: skip
    console.print(f"{size.micro_batches} micro-batches of {size.tokens} tokens; times of one micro-batch:")
    console.print(table)
    pipeline = SimulatedPipeline(
        forward_s=tuple(stage.forward_s for stage in size.stages),
        backward_s=tuple(stage.backward_s for stage in size.stages), micro_batches=size.micro_batches,
        chunks=profile.chunks, send_s=size.send_s,
    )  # fmt: skip
    rest = size.sync_s + size.update_s
    console.print(
        f"an iteration: {size.iteration_s:.4g} s measured, {pipeline.simulate() + rest:.4g} s by event simulation, "
        f"{pipeline.closed_form() + rest:.4g} s by the closed form; synchronisation takes {size.sync_s:.3g} s, "
        f"the update {size.update_s:.3g} s"
        + (
            f"; ranks share {profile.cores} processors, so measured times of stages that wait are too long"
            if profile.cores
            else ""
        )
    )
