"""Command line of `moevement`. Each subcommand has a module of the same name.

Subcommands that report take ``--json``, which prints one JSON object as the last line. The module of a subcommand has
a function ``add_to(parser)``, which adds the arguments and sets the default ``run``. ``run(arguments)`` returns the
exit code. Only the module of the requested subcommand is imported.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module

from moevement_core.util.exit_codes import (
    INTERRUPTED,
    USAGE_ERROR,
    exit_cleanly,
    files_are_given,
    quiet_on_closed_output,
)
from moevement_core.util.interrupts import interruptible
from moevement_core.util.versions import version_line

GROUPS = {
    "run": {
        "launch": "start the ranks of a training script",
        "coordinate": "coordinate a job on several hosts, and assign its ranks",
        "data": "make token files from text",
        "drain": "move ranks of a running job off a node or a process",
        "export": "turn a window on disk into a dense checkpoint",
    },
    "look": {
        "top": "show what a run does now, in the terminal",
        "report": "summarize runs: table, plot, page and timeline",
        "verify": "compare two runs, bit for bit",
        "windows": "list the windows of a job on disk, from which a job can start",
    },
    "size": {
        "plan": "compute what sparse checkpointing of a job will cost",
        "simulate": "compute what failures cost under each checkpointing strategy",
        "advise": "compute the GPU hours that a job loses per month, today and with each strategy",
        "elastic": "compute the cost of nodes that leave and join, with elastic experts and without",
        "profile": "measure the parts of an iteration of a real run, for moevement simulate",
    },
    "test": {
        "bench": "measure the costs of saving and recovery on this machine",
        "drill": "flip bits in the data of a job, and check that the job detects each flip",
    },
}
"""Commands and what each does, in groups, in the order in which a user needs the groups."""
COMMANDS = {name: purpose for commands in GROUPS.values() for name, purpose in commands.items()}
EXAMPLES = """\
examples:
  moevement launch --nproc 4 --spares 1 examples/pretrain_moe/pretrain_gpt.py \\
      --config examples/pretrain_moe/configs/laptop.yaml --run-dir runs/mine
  moevement top runs/mine
  moevement report runs/mine --html runs/mine/report.html

moevement COMMAND --help lists the options of a command.
"""


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"moevement: {message}; {self.prog} --help says more", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand in ``argv`` and return its exit code.

    Without ``argv``, the function reads the arguments of the process. After its return the process ignores SIGINT, so
    the caller has to end the process, as the console script does.
    """
    try:
        with exit_cleanly(), quiet_on_closed_output(), interruptible(process_ends=argv is None):
            return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("moevement: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


def _run(words: list[str]) -> int:
    parser = _parser(words)
    arguments, others = parser.parse_known_args(words)
    if others and not hasattr(arguments, "flags"):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    arguments.flags = [word for word in others if word != "--"]
    arguments.command_line = shlex.join(["moevement", *words])
    # Under Slurm, launch runs the user's script in this process. Errors of the script must keep their traceback.
    with nullcontext() if words[:1] == ["launch"] else files_are_given():
        code = int(arguments.run(arguments))
    sys.stdout.flush()
    return code


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="moevement", usage="moevement [--help] [--version] COMMAND ...",
        description="Native fault tolerance for MoE training on Megatron-Core.", epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=version_line())
    listed = "\n".join(
        f"{group}:\n" + "\n".join(f"  {name:<11} {purpose}" for name, purpose in commands.items())
        for group, commands in GROUPS.items()
    )
    commands = parser.add_subparsers(
        title="commands", description=listed, required=True, metavar="COMMAND", prog="moevement", help=argparse.SUPPRESS
    )
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, description=f"{purpose[0].upper()}{purpose[1:]}.")
        if name in words:
            import_module(f"moevement_cli.{name}").add_to(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
