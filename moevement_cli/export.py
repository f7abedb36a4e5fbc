"""Command ``moevement export``, which turns a window on disk into a dense checkpoint of Megatron."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from moevement_core.errors import ConfigError
from moevement_core.launching import config_file
from moevement_core.storage.locations import check_location
from moevement_core.storage.manifest import Manifest
from moevement_core.storage.places import store_at
from moevement_core.trainer.config import SWITCH
from moevement_core.util.numbers import NOT_NEGATIVE

DROPPED = frozenset({
    "--run-dir", "--moevement-persist-dir", "--moevement-load", "--moevement-load-iteration", "--save",
    "--save-interval", "--exit-interval", "--moevement-keep-windows", "--moevement-keep-windows-every",
    "--moevement-metrics-port", "--moevement-elastic", "--tensorboard-dir", "--load", "--ckpt-step",
    "--moevement-audit-interval", "--moevement-audit-memory", "--moevement-inject", "--moevement-inject-flip",
    "--moevement-inject-corruption", "--moevement-inject-mtbf", "--moevement-inject-trace", "--moevement-wipe-at",
    "--moevement-rollback-on-spike", "--moevement-rollback-by",
})  # fmt: skip
"""Flags of the job that an export leaves out: it writes to no folder of the job, and trains nothing."""
SIZES = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
    "context_parallel_size": "--context-parallel-size",
}
"""Megatron's flags of a layout that take a size, by the name of the setting in a window."""
SWITCHES = {"sequence_parallel": "--sequence-parallel", "use_distributed_optimizer": "--use-distributed-optimizer"}
"""Megatron's flags of a layout that take no value, by the name of the setting in a window."""
VOCABULARY = "--make-vocab-size-divisible-by"
OF_LAYOUT = frozenset({
    *SIZES.values(), *SWITCHES.values(), VOCABULARY, "--num-layers-per-virtual-pipeline-stage", "--overlap-grad-reduce",
    "--overlap-param-gather", "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler",
    "--no-load-optim", "--no-load-rng", "--finetune",
})  # fmt: skip
"""Flags that a job of another layout may have, in place of those with which the window was written."""
EXPORT, RESHARDABLE = "--moevement-export", "--dist-ckpt-optim-fully-reshardable"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the description and arguments of ``moevement export``."""
    parser.description = (
        "Turn a window in DIR into a dense checkpoint, which Megatron loads with --load under any layout. SCRIPT and "
        "its arguments are those of the job that wrote the window, or of the job that is to load the result: the "
        "layout comes from the window. The command starts as many ranks as the window has, on this host, restores the "
        "window, saves, and ends. On several hosts, add --moevement-load DIR, --save OUT and --moevement-export to the "
        "job itself."
    )
    parser.add_argument(
        "folder", metavar="DIR", type=partial(check_location, "DIR"),
        help="a folder or a URL of --moevement-persist-dir",
    )  # fmt: skip
    parser.add_argument("--to", metavar="OUT", type=Path, required=True, help="folder for the dense checkpoint")
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="iteration that the window restores (default: the newest)"
    )
    parser.add_argument("script", metavar="SCRIPT", help="training script of the job")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of SCRIPT")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks that export, and return their exit code.

    Raises:
        ConfigError: there is no such window, or the window does not say how many ranks wrote it.
    """
    from moevement_cli.main import main

    NOT_NEGATIVE.check("--iteration", arguments.iteration)
    window = _window(arguments.folder, arguments.iteration)
    settings = window.settings
    ranks = settings.get("world_size")
    if not isinstance(ranks, int) or not settings.keys() >= SIZES.keys():
        raise ConfigError(
            f"{arguments.folder}: {window.name} does not say how many ranks wrote it; export windows of Megatron's "
            "trainer, and save the state of your own trainer by its own means"
        )
    words = list(without(config_file.expand(arguments.arguments), DROPPED | OF_LAYOUT))
    words += [
        *layout_of(settings), *(() if SWITCH in words else (SWITCH,)), "--moevement-load", arguments.folder,
        "--moevement-load-iteration", str(window.reaches), "--save", str(arguments.to),
        "--save-interval", "1000000000", EXPORT,
    ]  # fmt: skip
    if settings.get("use_distributed_optimizer") and RESHARDABLE not in words:
        words.append(RESHARDABLE)  # Otherwise only jobs with the same model-parallel sizes could load the optimizer.
    print(f"moevement: exporting iteration {window.reaches} with {ranks} ranks", flush=True)
    with tempfile.TemporaryDirectory() as scratch:  # Some strategies need a folder for windows; none is written.
        words += ["--moevement-persist-dir", scratch]
        return main(["launch", "--nproc", str(ranks), arguments.script, *words])


def layout_of(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of the command line that give a job the layout of a window.

    Args:
        settings: settings of the window (:attr:`Manifest.settings`).
    """
    for name, flag in SIZES.items():
        if settings[name] is not None:
            yield from (flag, str(settings[name]))
    for name, flag in SWITCHES.items():
        if settings.get(name):
            yield flag
    if (rows := settings.get("padded_vocab_size")) is not None:  # Megatron pads to a multiple of this number, times TP
        yield from (VOCABULARY, str(rows // settings["tensor_model_parallel_size"]))


def _window(folder: str, iteration: int | None) -> Manifest:
    """Return the window that restores ``iteration``; None for the newest one.

    Raises:
        ConfigError: there is no such window.
    """
    try:
        windows = store_at(folder).manifests()
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; give a place that can be read") from None
    if not windows:
        raise ConfigError(f"{folder}: no window; give a folder of --moevement-persist-dir")
    if iteration is None:
        return max(windows, key=lambda window: window.reaches)
    for window in windows:
        if window.reaches == iteration:
            return window
    known = ", ".join(str(each) for each in sorted({window.reaches for window in windows}))
    raise ConfigError(f"--iteration {iteration}: no window in {folder} restores it; the windows restore {known}")


def without(words: Iterable[str], flags: frozenset[str]) -> Iterable[str]:
    """Yield the words of a command line without some flags and their values."""
    is_dropped = False
    for word in words:
        if word.startswith("--"):
            is_dropped = word.partition("=")[0] in flags
        if not is_dropped:
            yield word
