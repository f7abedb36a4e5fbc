"""Command ``moevement coordinate``, which coordinates a job on several hosts and assigns its ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from moevement_core.errors import ConfigError
from moevement_core.util.output import never_fails
from moevement_core.util.variables import check_variables


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the description and arguments of ``moevement coordinate``."""
    parser.description = (
        "Coordinate a job on several hosts: assign ranks, and hold what processes share. Start one coordinator for "
        "each job, in the job script beside srun, so that the coordinator outlives every rank. Set MOEVEMENT_STORE "
        "to its HOST:PORT in the tasks, which run `moevement launch --spares S SCRIPT`."
    )
    parser.add_argument(
        "--ranks", type=int, required=True, metavar="N", help="number of ranks of the job, without spares"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, metavar="P", help="port to listen at (default: any free port)")
    parser.add_argument(
        "--spare-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds that the job waits for a spare if none is left (default: 600)",
    )
    parser.add_argument(
        "--run-dir", type=_folder, metavar="DIR", help="run directory of the job; ranks.json goes there"
    )
    parser.add_argument(
        "--nodes",
        metavar="A,B,...",
        help="run COMMAND once for each of these nodes; {host} in COMMAND is replaced by the node",
    )
    parser.add_argument(
        "--tasks-per-node", type=int, default=1, metavar="K", help="number of tasks that COMMAND starts (default: 1)"
    )
    parser.add_argument(
        "--no-standby",
        action="store_true",
        help="start no standby, the process on another node that takes over when the coordinator is lost",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="command that starts the tasks of a node (srun --nodes=1 --nodelist={host} ... moevement launch ...), "
        "with MOEVEMENT_STORE set; if the tasks end before the job, the coordinator runs COMMAND again",
    )
    parser.set_defaults(run=run, command_line="")


def _folder(text: str) -> Path:
    """Return the path of a folder, and refuse an empty string.

    An empty path would mean the current folder. It usually comes from a variable that is not set.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is an empty path; give a folder, or leave the option out")
    return Path(text)


def run(arguments: argparse.Namespace) -> int:
    """Run the coordinator and return its exit code."""
    never_fails()
    check_variables()
    from moevement_core.launching.coordinate import Coordination, coordinate
    from moevement_core.launching.node_tasks import NodeCommand

    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if words and not arguments.nodes:
        raise ConfigError("COMMAND is given without --nodes; name the nodes whose tasks it starts, as in --nodes n1,n2")
    tasks = NodeCommand(arguments.nodes.split(","), arguments.tasks_per_node, words) if words else None
    return coordinate(
        Coordination(
            ranks=arguments.ranks,
            host=arguments.host,
            port=arguments.port,
            spare_timeout_s=arguments.spare_timeout,
            run_dir=arguments.run_dir,
            tasks=tasks,
            command=arguments.command_line,
            has_standby=not arguments.no_standby,
        )
    )
