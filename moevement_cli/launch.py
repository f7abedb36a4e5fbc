"""Command ``moevement launch``, which starts the ranks of a training script."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from moevement_core.elastic.config import SWITCH as ELASTIC
from moevement_core.launching import config_file
from moevement_core.util.output import never_fails
from moevement_core.util.variables import check_variables


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the description and arguments of ``moevement launch``."""
    parser.description = (
        "Start SCRIPT on N ranks of this host, fault tolerant, or, under srun, as the one rank that "
        "this task is. Everything after SCRIPT goes to the script, Megatron's flags and --config FILE, --run-dir DIR."
    )
    parser.epilog = (
        "Fault tolerance is set by flags of the script, too: --moevement-sparse-ckpt switches it on, and the other "
        "--moevement-* flags are listed in docs/flags.md and by `moevement launch --nproc 1 SCRIPT --help`."
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="ranks on this host; under srun processes of each task (default there: 1)",
    )
    parser.add_argument(
        "--logs",
        choices=("console", "files"),
        help="ranks print here, or each to files in the run directory while progress is shown here "
        "(default: files if the script gets --run-dir)",
    )
    parser.add_argument(
        "--fresh-interpreters",
        action="store_true",
        help="start each rank as a new Python process (always so with a GPU; without one ranks are forked from a "
        "process that has imported Megatron once)",
    )
    parser.add_argument(
        "--spares",
        type=int,
        metavar="S",
        help="start S processes more, of which one takes the place of each rank that dies; the job goes on "
        "(0: of those that are started again then; without the option the first failure ends the job, unless it is "
        "elastic)",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="K",
        help="take every K processes for a node of its own, for trying failures of nodes on one host",
    )
    parser.add_argument(
        "--spare-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds that the job waits for a spare where none is left (default: 600)",
    )
    parser.add_argument(
        "--respawn-after",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds until a process is started in the place of one that died, or inf for never, for trying an "
        "elastic job on one host (default: 0)",
    )
    parser.add_argument(
        "--trainer",
        choices=("megatron", "torch"),
        default="megatron",
        help="what SCRIPT trains with: Megatron, or a trainer of its own in torch, bound as in "
        "examples/plain_torch/train.py (default: megatron)",
    )
    parser.add_argument(
        "--megatron",
        type=Path,
        metavar="DIR",
        help="train with megatron.core and megatron.training of this checkout of Megatron-LM (default: those that are "
        "installed, wherever SCRIPT is)",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a training script, ours or Megatron-LM's own pretrain_gpt.py")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=run, command_line="")


def run(arguments: argparse.Namespace) -> int:
    """Launch the ranks, or run as the rank of a Slurm task, and return the exit code."""
    never_fails()
    check_variables()
    argv = [arguments.script, *arguments.arguments]
    if arguments.spares is None and ELASTIC in config_file.expand(argv[1:]):
        arguments.spares = 0
    if arguments.spares is not None:  # torch reads it at import; without it each poll of the store warns
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from megatron.moevement import checkout
    from megatron.moevement import slurm as megatrons
    from megatron.moevement.worker import MEGATRON
    from moevement_core.launching import launch, slurm
    from moevement_core.launching.worker import TORCH, end_groups
    from moevement_core.util.environment import STORE_ENV
    from moevement_core.util.lock import acquire

    trainer = TORCH if arguments.trainer == "torch" else MEGATRON
    if arguments.megatron is not None:
        checkout.use(arguments.megatron)
    if trainer is MEGATRON and (which := checkout.passed_over(arguments.script)) is not None:
        print(f"moevement: {which}", flush=True)
    in_cluster = arguments.spares is not None and STORE_ENV in os.environ
    if arguments.nproc is None or in_cluster:
        variables = (slurm if trainer is TORCH else megatrons).read_variables()
        environment = slurm.task_environment(
            *variables, meets_at_master=arguments.spares is None, devices=trainer.count_devices()
        )
        if arguments.spares is not None:
            from moevement_core.launching.supervise import supervise, task_of

            task = task_of(environment, arguments.nproc or 1)
            return supervise(
                argv, task, arguments.spares, environment, trainer, fresh_interpreters=arguments.fresh_interpreters
            )
        os.environ.update(environment | launch.gpu_environment(trainer, has_spares=False))
        trainer.run_rank(argv)
        end_groups()
        return 0
    if (run_dir := launch.run_dir_of(argv)) is not None and run_dir.is_dir():
        # The lock keeps this job from overwriting the logs of a running one. The ranks take it later for themselves.
        acquire(run_dir, "launcher", "--run-dir", report=lambda text: print(f"moevement: {text}", flush=True)).release()
    return launch.launch_on_this_host(
        launch.Launch(
            nproc=arguments.nproc,
            argv=argv,
            trainer=trainer,
            show_logs=arguments.logs == "console" or launch.run_dir_of(argv) is None,
            fresh_interpreters=arguments.fresh_interpreters,
            spares=arguments.spares,
            ranks_per_node=arguments.ranks_per_node,
            spare_timeout_s=arguments.spare_timeout,
            respawn_after_s=arguments.respawn_after,
            command=arguments.command_line,
        )
    )
