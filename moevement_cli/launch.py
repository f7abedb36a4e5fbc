"""Command ``moevement launch``, which starts the ranks of a training script."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from moevement_core.elastic.config import SWITCH as ELASTIC
from moevement_core.launching import config_file
from moevement_core.util.extras import require
from moevement_core.util.output import never_fails
from moevement_core.util.variables import check_variables


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the description and arguments of ``moevement launch``."""
    parser.description = (
        "Start SCRIPT with fault tolerance on N ranks of this host. Under srun, each task starts its own ranks. "
        "Everything after SCRIPT goes to the script: Megatron's flags, --config FILE and --run-dir DIR."
    )
    parser.epilog = (
        "Flags of the script configure fault tolerance: --moevement-sparse-ckpt switches it on. docs/flags.md and "
        "`moevement launch --nproc 1 SCRIPT --help` list the other --moevement-* flags."
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="ranks on this host; under srun, processes per task (default under srun: 1)",
    )
    parser.add_argument(
        "--logs",
        choices=("console", "files"),
        help="console: the ranks print here; files: each rank prints to files in the run directory, and progress is "
        "shown here (default: files if the script gets --run-dir, else console)",
    )
    parser.add_argument(
        "--fresh-interpreters",
        action="store_true",
        help="start each rank as a new Python process (default without a GPU: fork ranks from one process that has "
        "imported Megatron; with a GPU, ranks are always new processes)",
    )
    parser.add_argument(
        "--spares",
        type=int,
        metavar="S",
        help="start S spare processes; a spare takes over the rank of each process that dies, and the job continues "
        "(0: the job waits for a process that the launcher starts after the death; without the option, the first "
        "failure ends the job, unless the job is elastic)",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="K",
        help="treat every K processes as a separate node, to try failures of nodes on one host",
    )
    parser.add_argument(
        "--spare-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds that the job waits for a spare if none is left (default: 600)",
    )
    parser.add_argument(
        "--respawn-after",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds from the death of a process until the launcher starts another one in its place; inf: never, to "
        "try an elastic job on one host (default: 0)",
    )
    parser.add_argument(
        "--trainer",
        choices=("megatron", "bridge", "torch"),
        default="megatron",
        help="megatron: SCRIPT trains with Megatron-LM's trainer; bridge: SCRIPT trains with Megatron-Bridge, or is "
        "the name of a recipe, after which ARGS are settings such as model.num_layers=2; torch: "
        "SCRIPT has its own trainer in torch and a binding for it, as in examples/plain_torch/train.py (default: "
        "megatron)",
    )
    parser.add_argument(
        "--megatron",
        type=Path,
        metavar="DIR",
        help="train with megatron.core and megatron.training of this checkout of Megatron-LM (default: the installed "
        "packages, even if SCRIPT lies in a checkout)",
    )
    parser.add_argument("script", metavar="SCRIPT", help="training script, such as Megatron-LM's pretrain_gpt.py")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of SCRIPT")
    parser.set_defaults(run=run, command_line="")


def run(arguments: argparse.Namespace) -> int:
    """Launch the ranks on this host, or those of a Slurm task, and return the exit code."""
    never_fails()
    check_variables()
    argv = [arguments.script, *arguments.arguments]
    if arguments.spares is None and ELASTIC in config_file.expand(argv[1:]):
        arguments.spares = 0
    if arguments.spares is not None:  # Without this variable at its import, torch warns at each poll of the store.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from megatron.moevement import checkout
    from megatron.moevement import slurm as megatrons
    from megatron.moevement.bridge.worker import BRIDGE
    from megatron.moevement.worker import MEGATRON
    from moevement_core.launching import launch, slurm
    from moevement_core.launching.worker import TORCH, end_groups
    from moevement_core.util.environment import STORE_ENV
    from moevement_core.util.lock import acquire

    trainer = {"torch": TORCH, "bridge": BRIDGE, "megatron": MEGATRON}[arguments.trainer]
    if arguments.megatron is not None:
        checkout.use(arguments.megatron)
    if trainer is not TORCH:
        require(
            "megatron.core",
            f"moevement launch {arguments.script}",
            "give --trainer torch if the script has its own trainer",
        )
        checkout.note_checkout()
    if arguments.spares is not None:
        require("nvidia_resiliency_ext", f"--spares {arguments.spares}", "leave --spares out")
    if trainer is not TORCH:
        for note in (checkout.untested(), checkout.passed_over(arguments.script) if trainer is MEGATRON else None):
            if note is not None:
                print(f"moevement: {note}", flush=True)
    if trainer is BRIDGE:
        from megatron.moevement.bridge.recipes import as_script

        argv = as_script(argv)
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
                argv,
                task,
                spares=arguments.spares,
                environment=environment,
                trainer=trainer,
                fresh_interpreters=arguments.fresh_interpreters,
            )
        os.environ.update(environment | launch.gpu_environment(trainer, has_spares=False))
        trainer.run_rank(argv)
        end_groups()
        return 0
    if (run_dir := launch.run_dir_of(argv)) is not None and run_dir.is_dir():
        # Acquire and release the lock before this job overwrites logs. If another job still writes to the directory,
        # this raises an error. The ranks acquire the lock themselves later.
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
