"""The `moevement` command line: one tool, a subcommand for each thing a user does.

Every subcommand that reports takes ``--json`` and then prints one JSON object as its last line. Heavy imports happen
inside the subcommand that needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from moevement_core import __version__
from moevement_core.cli.exit_codes import USAGE_ERROR, exit_cleanly
from moevement_core.errors import ConfigError


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"moevement: {message}; {self.prog} --help says more", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)


def main(argv: list[str] | None = None) -> int:
    """Entry of the console script; returns the exit code."""
    parser = _parser()
    arguments, others = parser.parse_known_args(argv)
    if others and not hasattr(arguments, "flags"):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    arguments.flags = [word for word in others if word != "--"]
    with exit_cleanly():
        return int(arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(prog="moevement", description="Native fault tolerance for MoE training on Megatron-Core.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_launch(commands)
    _add_coordinate(commands)
    _add_data(commands)
    _add_plan(commands)
    _add_simulate(commands)
    _add_profile(commands)
    _add_bench(commands)
    _add_verify(commands)
    _add_report(commands)
    return parser


def _add_launch(commands: argparse._SubParsersAction) -> None:
    launch = commands.add_parser(
        "launch",
        help="start the ranks of a training script",
        description="Start SCRIPT on N ranks of this host with the fork active, or, under srun, as the one rank that "
        "this task is. Everything after SCRIPT goes to the script, Megatron's flags and --config FILE, --run-dir DIR.",
    )
    launch.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="ranks on this host; under srun processes of each task (default there: 1)",
    )
    launch.add_argument(
        "--logs",
        choices=("console", "files"),
        help="ranks print here, or each to files in the run directory while progress is shown here "
        "(default: files if the script gets --run-dir)",
    )
    launch.add_argument(
        "--fresh-interpreters",
        action="store_true",
        help="start each rank as a new Python process (always so with a GPU; without one ranks are forked from a "
        "process that has imported Megatron once)",
    )
    launch.add_argument(
        "--spares",
        type=int,
        metavar="S",
        help="start S processes more, of which one takes the place of each rank that dies; the job goes on "
        "(0: of those that are started anew then; without the option the first failure ends the job)",
    )
    launch.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="K",
        help="take every K processes for a node of its own, for trying failures of nodes on one host",
    )
    launch.add_argument(
        "--spare-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds that the job waits for a spare where none is left (default: 600)",
    )
    launch.add_argument("script", metavar="SCRIPT", help="a training script, ours or Megatron-LM's own pretrain_gpt.py")
    launch.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    launch.set_defaults(run=_launch)


def _launch(arguments: argparse.Namespace) -> int:
    if arguments.spares is not None:  # torch reads it once, at import; else each look into the store is a warning
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from megatron.moevement import launch, worker
    from megatron.moevement.restart.environment import STORE_ENV
    from moevement_core.persistence.lock import acquire

    argv = [arguments.script, *arguments.arguments]
    in_cluster = arguments.spares is not None and STORE_ENV in os.environ
    if arguments.nproc is None or in_cluster:
        environment = launch.slurm_environment(meets_at_master=arguments.spares is None)
        if arguments.spares is not None:
            from megatron.moevement.supervise import supervise, task_of

            task = task_of(environment, arguments.nproc or 1)
            return supervise(argv, task, arguments.spares, environment, fresh_interpreters=arguments.fresh_interpreters)
        os.environ.update(environment)
        worker.run_rank(argv)
        worker.end_groups()
        return 0
    if (run_dir := launch.run_dir_of(argv)) is not None and run_dir.is_dir():
        # Before the logs of a job that runs are overwritten by this one's; the ranks take the lock for their job.
        acquire(run_dir, "launcher", "--run-dir", report=lambda text: print(f"moevement: {text}", flush=True)).release()
    return launch.launch_on_this_host(
        launch.Launch(
            nproc=arguments.nproc,
            argv=argv,
            show_logs=arguments.logs == "console" or launch.run_dir_of(argv) is None,
            fresh_interpreters=arguments.fresh_interpreters,
            spares=arguments.spares,
            ranks_per_node=arguments.ranks_per_node,
            spare_timeout_s=arguments.spare_timeout,
        )
    )


def _add_coordinate(commands: argparse._SubParsersAction) -> None:
    coordinate = commands.add_parser(
        "coordinate",
        help="hold the store of a job over several hosts and give out its ranks",
        description="One for each job, where it outlives every rank: in the job script, beside srun. The tasks run "
        "`moevement launch --spares S SCRIPT`, with MOEVEMENT_STORE=HOST:PORT of this one.",
    )
    coordinate.add_argument("--ranks", type=int, required=True, metavar="N", help="ranks of the job, without spares")
    coordinate.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    coordinate.add_argument("--port", type=int, default=0, metavar="P", help="port (default: any that is free)")
    coordinate.add_argument(
        "--spare-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds that the job waits for a spare where none is left (default: 600)",
    )
    coordinate.add_argument("--run-dir", type=_folder, metavar="DIR", help="the job's, in which ranks.json is kept")
    coordinate.add_argument(
        "--nodes", metavar="A,B,...", help="run COMMAND once for each of these nodes, {host} in it is the name of one"
    )
    coordinate.add_argument(
        "--tasks-per-node", type=int, default=1, metavar="K", help="that COMMAND starts (default: 1)"
    )
    coordinate.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="starts the tasks of a node (srun --nodes=1 --nodelist={host} ... moevement launch ...), with "
        "MOEVEMENT_STORE set; again if they end before the job does",
    )
    coordinate.set_defaults(run=_coordinate)


def _folder(text: str) -> Path:
    """A path that is not empty: that would mean the current folder, and comes from a variable that is not set."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is an empty path; give a folder, or leave the option out")
    return Path(text)


def _coordinate(arguments: argparse.Namespace) -> int:
    from megatron.moevement.coordinate import Coordination, coordinate
    from megatron.moevement.node_tasks import NodeCommand

    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if words and not arguments.nodes:
        raise ConfigError("a command without --nodes; say which nodes it is run for, as in --nodes n1,n2")
    tasks = NodeCommand(arguments.nodes.split(","), arguments.tasks_per_node, words) if words else None
    return coordinate(
        Coordination(arguments.ranks, arguments.host, arguments.port, arguments.spare_timeout, arguments.run_dir, tasks)
    )


def _add_data(commands: argparse._SubParsersAction) -> None:
    data = commands.add_parser("data", help="make token files from text")
    actions = data.add_subparsers(title="actions", metavar="ACTION", required=True)
    build = actions.add_parser(
        "build",
        help="text files to the .bin and .idx that --data-path reads",
        description="Write PREFIX.bin, PREFIX.idx and PREFIX.json from text files (or .jsonl, either also .gz). "
        "Without --tokenizer a token is a byte.",
    )
    build.add_argument(
        "inputs", metavar="INPUT", nargs="+", type=Path, help="a text file, .jsonl file or folder of them"
    )
    build.add_argument("--output", metavar="PREFIX", type=Path, required=True, help="path without suffix")
    build.add_argument(
        "--tokenizer",
        metavar="FILE",
        type=Path,
        help="a Hugging Face tokenizer.json or its folder, or a SentencePiece .model",
    )
    build.add_argument(
        "--documents",
        choices=("file", "line", "paragraph"),
        default="file",
        help="what of a text file is one document (default: the file)",
    )
    build.add_argument("--json-key", default="text", help="where a .jsonl line has its text (default: text)")
    build.add_argument("--overwrite", action="store_true", help="replace token files that are there")
    build.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    build.set_defaults(run=_data_build)


def _data_build(arguments: argparse.Namespace) -> int:
    from moevement_core.cli import data

    return data.build(arguments)


def _add_plan(commands: argparse._SubParsersAction) -> None:
    plan = commands.add_parser(
        "plan",
        help="what sparse checkpointing of a job will cost",
        description="Say how many iterations a window needs and what it costs, from the model, the layout and the "
        "bandwidths, without starting anything. Megatron builds the model without memory, so every flag means what it "
        "means in a run; flags of Megatron's may stand among those below and win over the file's. docs/windows.md "
        "explains the numbers.",
        allow_abbrev=False,
    )
    _add_job(plan)
    plan.set_defaults(run=_plan, flags=[])


def _add_job(plan: argparse.ArgumentParser) -> None:
    """What is planned: a model, a layout, machines."""
    plan.add_argument("model", metavar="MODEL", help="a preset (gpt_moe, ...) or a .yaml of Megatron's flags")
    plan.add_argument("--ranks", type=int, required=True, metavar="N", help="GPUs of the job")
    plan.add_argument(
        "--iteration-time", type=float, required=True, metavar="S", help="seconds that an iteration takes; measure one"
    )
    _add_machines(plan)


def _add_machines(plan: argparse.ArgumentParser, *, has_defaults: bool = True) -> None:
    """What is planned or simulated beside the job; without defaults, what is left out is a scenario's."""
    from moevement_core.description.cluster import CLUSTERS
    from moevement_core.policy.window import WindowKind
    from moevement_core.precision import PRESETS, Scaling

    plan.add_argument("--cluster", choices=tuple(CLUSTERS), help="machines of the paper; what you give below wins")
    plan.add_argument(
        "--d2h-bandwidth", type=float, metavar="GB/S", help="copies of one GPU to its host, all GPUs copying"
    )
    plan.add_argument("--network-bandwidth", type=float, metavar="GB/S", help="what all NICs of a node send together")
    plan.add_argument(
        "--network-share", type=float, metavar="F", help="fraction left for replication beside training (default: 1)"
    )
    plan.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of a node")
    plan.add_argument("--host-memory", type=float, metavar="GB", help="host memory of a node, to be checked")
    plan.add_argument(
        "--replicas",
        type=int,
        default=2 if has_defaults else None,
        metavar="R",
        help="peers that keep a copy (default: 2)",
    )
    plan.add_argument(
        "--window-kind",
        choices=[str(kind) for kind in WindowKind],
        default="aligned" if has_defaults else None,
        help="default: aligned",
    )
    plan.add_argument("--window", type=int, metavar="W", help="impose a window (default: the smallest that fits)")
    plan.add_argument(
        "--regime",
        metavar="R",
        help=f"{', '.join(PRESETS)}, or compute/master/moments as FP8/FP16/FP8+FP16 (default: what the flags say)",
    )
    plan.add_argument(
        "--fp8-scaling",
        choices=[str(scaling) for scaling in Scaling],
        default="tensor" if has_defaults else None,
        help="a scale for each tensor, 128 x 128 block, or 32 elements (default: tensor)",
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def _plan(arguments: argparse.Namespace) -> int:
    from moevement_core.cli import plan

    return plan.plan(arguments)


def _add_simulate(commands: argparse._SubParsersAction) -> None:
    from moevement_core.simulator.strategies import STRATEGIES

    simulate = commands.add_parser(
        "simulate",
        help="what a failure rate costs under each way of checkpointing",
        description="Hours of a training with failures, drawn or recorded, under several ways of checkpointing: the "
        "effective training time ratio by the formula and by simulation, and where the rest of the time went. WHAT is "
        "a scenario file, which says everything, or a model as for moevement plan; several are compared. What stands "
        "on the command line wins over the file. docs/simulator.md has every field, and says what is assumed.",
        allow_abbrev=False,
    )
    add = simulate.add_argument
    add("what", nargs="+", metavar="WHAT",
        help="a scenario (deepseek_671b, ..., or a .yaml with a job), or a model by Megatron's flags with --ranks, "
        "--iteration-time and a cluster")  # fmt: skip
    add("--ranks", type=int, nargs="+", metavar="N", help="GPUs of the job; several are compared")
    add("--iteration-time", type=float, metavar="S", help="seconds of an iteration, if it is known")
    _add_machines(simulate, has_defaults=False)
    add("--mtbf", type=float, nargs="+", metavar="S",
        help="mean seconds between failures of the job (default: the paper's 2 h to 10 min)")  # fmt: skip
    add("--strategy", nargs="+", choices=list(STRATEGIES), metavar="NAME", help=f"any of {', '.join(STRATEGIES)}")
    add("--hours", type=float, metavar="H", help="of wall time (default: 12)")
    add("--seeds", type=int, metavar="N", help="trainings of each kind (default: 20)")
    add("--first-seed", type=int, metavar="N", help="the others follow (default: 0)")
    add("--weibull", type=float, metavar="K",
        help="shape of the time between failures: 1 is a Poisson process, less gives bursts (default: 1)")  # fmt: skip
    add("--together", type=float, metavar="P",
        help="probability that a failing node takes the next one along (default: 0)")  # fmt: skip
    add("--trace", type=Path, metavar="FILE",
        help="recorded failures instead of drawn ones: lines of milliseconds,add|remove,NODE")  # fmt: skip
    add("--speedup", type=float, metavar="X", help="let the trace run X times as fast (default: 1)")
    add("--spares", type=int, metavar="N", help="spare nodes at the start (default: always one more)")
    add("--repair", type=float, metavar="S",
        help="seconds after which a failed node is a spare again (default: never)")  # fmt: skip
    add("--detect", type=float, metavar="S", help="until a failure is noticed (default: 1)")
    add("--regroup", type=float, metavar="S", help="until process groups are there again (default: 10)")
    add("--interference", type=float, metavar="F",
        help="share of the seconds of copies beside training by which they lengthen it (default: 0)")  # fmt: skip
    add("--skew", type=float, metavar="S", help="of the popularity of experts, 0 to 1 (default: 0)")
    add("--storage-bandwidth", type=float, metavar="GB/S", help="to durable storage, all nodes together")
    add("--workers", type=int, default=1, metavar="N", help="processes; more pay from thousands of trainings on")
    add("--best", action="store_true", help="propose strategy, window, replicas and interval, with reasons")
    add("--plot", type=Path, metavar="FILE", help="ETTR over failure rate and interval, lost time, goodput")
    simulate.set_defaults(run=_simulate, flags=[])


def _simulate(arguments: argparse.Namespace) -> int:
    from moevement_core.cli import simulate

    return simulate.simulate(arguments)


def _add_profile(commands: argparse._SubParsersAction) -> None:
    profile = commands.add_parser(
        "profile",
        help="measure what an iteration of a real run is made of, for moevement simulate",
        description="Train SCRIPT for a few iterations and write what it took: forward and backward pass of each "
        "stage, synchronisation, update, memory of a layer, copies, storage, collectives over message sizes. A "
        "scenario with 'profile: FILE' is simulated with that.",
    )
    profile.add_argument("--nproc", type=int, required=True, metavar="N", help="ranks on this host")
    profile.add_argument("--iterations", type=int, default=16, metavar="K", help="half of them timed (default: 16)")
    profile.add_argument(
        "--micro-batch-sizes", type=int, nargs="+", metavar="B", help="measure each (default: what the flags say)"
    )
    profile.add_argument(
        "--output", type=Path, default=Path("profile.yaml"), metavar="FILE", help="default: profile.yaml"
    )
    profile.add_argument(
        "--storage", type=Path, metavar="DIR", help="folder on the storage to be measured (default: a temporary one)"
    )
    profile.add_argument("script", metavar="SCRIPT", help="a training script")
    profile.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    profile.set_defaults(run=_profile)


def _profile(arguments: argparse.Namespace) -> int:
    from moevement_core.cli import profile

    return profile.profile(arguments)


def _add_bench(commands: argparse._SubParsersAction) -> None:
    bench = commands.add_parser("bench", help="measure on this machine")
    actions = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    overhead = actions.add_parser(
        "overhead",
        help="what snapshots cost, part by part",
        description="Train a 57 M parameter MoE with snapshots off, captured, and captured and sent to peers, taking "
        "turns in one run. Ratios are of neighbouring blocks, with their quartiles.",
    )
    overhead.add_argument("--nproc", type=int, default=3, metavar="N", help="ranks (default: 3)")
    overhead.add_argument("--replicas", type=int, default=2, metavar="R", help="peers of each rank (default: 2)")
    overhead.add_argument("--window", type=int, default=6, metavar="W", help="iterations of a window (default: 6)")
    overhead.add_argument(
        "--micro-batches", type=int, nargs="+", default=[1, 4], metavar="M", help="iteration lengths (default: 1 4)"
    )
    overhead.add_argument("--blocks", type=int, default=8, metavar="B", help="rounds of all modes (default: 8)")
    overhead.add_argument("--block-iterations", type=int, default=6, metavar="I", help="of a mode (default: 6)")
    overhead.add_argument(
        "--verify", choices=["nothing", "window", "iteration"], default="window",
        help="when a digest of the whole state is made (default: window)",
    )  # fmt: skip
    overhead.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    overhead.set_defaults(run=_bench_overhead)

    replay = actions.add_parser(
        "replay",
        help="a replayed iteration against a normal one, as more operators are frozen",
        description="Replay iterations of a 57 M parameter MoE with a growing share of operators frozen, taking turns, "
        "under even and under skewed routing. Ratios are of the same round, with their quartiles.",
    )
    replay.add_argument("--nproc", type=int, default=2, metavar="N", help="expert-parallel ranks (default: 2)")
    replay.add_argument("--steps", type=int, default=4, metavar="S", help="steps of the share from 0 to 1 (default: 4)")
    replay.add_argument("--rounds", type=int, default=12, metavar="R", help="of all shares (default: 12)")
    replay.add_argument("--micro-batches", type=int, default=2, metavar="M", help="of an iteration (default: 2)")
    replay.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    replay.set_defaults(run=_bench_replay)

    recovery = actions.add_parser(
        "recovery",
        help="one stage that replays alone, against all stages",
        description="Train an MoE on a pipeline whose ranks lose their memory: those of one stage and those of all "
        "stages in turns, in one run. Times are for each replayed iteration, against a normal one. Then kill a rank "
        "again and again in two jobs, one in which its stage replays alone and one in which all do.",
    )
    recovery.add_argument(
        "--stages", type=int, default=4, metavar="N", help="pipeline stages, a rank each (default: 4)"
    )
    recovery.add_argument("--micro-batches", type=int, default=8, metavar="M", help="of an iteration (default: 8)")
    recovery.add_argument("--window", type=int, default=3, metavar="W", help="iterations of a window (default: 3)")
    recovery.add_argument("--rounds", type=int, default=5, metavar="R", help="losses of each kind (default: 5)")
    recovery.add_argument("--kills", type=int, default=5, metavar="K", help="in each of the two jobs (default: 5)")
    recovery.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    recovery.set_defaults(run=_bench_recovery)


def _bench_recovery(arguments: argparse.Namespace) -> int:
    from moevement_core.cli import bench_recovery

    return bench_recovery.recovery(arguments)


def _bench_replay(arguments: argparse.Namespace) -> int:
    from moevement_core.cli import bench_replay

    return bench_replay.replay(arguments)


def _bench_overhead(arguments: argparse.Namespace) -> int:
    from moevement_core.cli import bench

    return bench.overhead(arguments)


def _add_verify(commands: argparse._SubParsersAction) -> None:
    verify = commands.add_parser(
        "verify",
        help="whether two runs are the same, bit for bit",
        description="Compare two finished runs: losses and gradient norms of every iteration, and the digests of their "
        "final states. Exits with 0 only if they are equal.",
    )
    verify.add_argument("run_a", metavar="RUN_A", type=Path)
    verify.add_argument("run_b", metavar="RUN_B", type=Path)
    verify.add_argument(
        "--common",
        action="store_true",
        help="compare only iterations that both recorded (a resumed run has no early ones)",
    )
    verify.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    verify.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    from moevement_core.run_record import RunRecord
    from moevement_core.verify import compare

    a, b = RunRecord(arguments.run_a), RunRecord(arguments.run_b)
    verdict = compare(a, b, common_iterations=arguments.common)
    if verdict.equal:
        print(f"equal: {verdict.iterations_compared} iterations and the final state, bit for bit")
    else:
        print(f"DIFFERENT: {verdict.first_difference}")
        differing = [part for part, same in verdict.parts.items() if not same]
        print(f"parts of the final state that differ: {', '.join(differing) or 'none'}")
    if arguments.json:
        print(json.dumps(verdict.as_dict()))
    return 0 if verdict.equal else 1


def _add_report(commands: argparse._SubParsersAction) -> None:
    report = commands.add_parser("report", help="summary and plot of finished or running runs")
    report.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run directories")
    report.add_argument("--plot", metavar="FILE", type=Path, help="draw loss and gradient norm (.png, .svg or .pdf)")
    report.add_argument(
        "--trace", metavar="FILE", type=Path, help="write failures and recoveries as a timeline for ui.perfetto.dev"
    )
    report.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    report.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    from moevement_core.cli import report

    return report.report(arguments.runs, arguments.plot, arguments.trace, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
