"""The main module of every process that runs a training script: a rank, or a process that a rank spawns.

A rank is started as ``python -m megatron.moevement.worker SCRIPT ARGS...``. The script runs here, in this very
module, so that a spawned process (a checkpoint writer, a data worker), which re-imports its parent's main module
under the name ``__mp_main__``, gets the platform room before anything else, and then the script's own definitions.
"""

from __future__ import annotations

import os
import sys

SCRIPT_ENV = "MOEVEMENT_SCRIPT"
"""Absolute path of the script that this process and the processes it spawns run."""


def main(argv: list[str]) -> None:
    """Run ``argv[0]`` with the rest as its arguments, the fork active, as if it had been started by ``python``."""
    from megatron.moevement import config_file
    from megatron.moevement.activate import activate
    from moevement_core.cli.exit_codes import exit_cleanly

    script = os.path.abspath(argv[0])
    os.environ[SCRIPT_ENV] = script
    with exit_cleanly():
        sys.argv = [script, *config_file.expand(argv[1:])]
        activate()
        run_script(script)


def run_script(script: str) -> None:
    """Execute ``script`` in the namespace of the present main module."""
    namespace = sys.modules["__main__"].__dict__
    namespace["__file__"] = script
    sys.path.insert(0, os.path.dirname(script))
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec")
    exec(code, namespace)


def _prepare_spawned_process() -> None:
    from megatron.moevement import platform

    platform.install()
    # multiprocessing copies this module's namespace from __mp_main__, so the script must be found there.
    sys.modules["__main__"] = sys.modules[__name__] if __name__ in sys.modules else sys.modules["__main__"]
    script = os.environ[SCRIPT_ENV]
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec")
    globals()["__file__"] = script
    exec(code, globals())


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m megatron.moevement.worker SCRIPT [ARGS...]")
    main(sys.argv[1:])
elif __name__ == "__mp_main__" and SCRIPT_ENV in os.environ:
    _prepare_spawned_process()
