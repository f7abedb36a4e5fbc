"""A process that runs a training script with the fork active: a rank, or a process that a rank spawns.

The script runs in a main module whose origin is this module. So a spawned process (a checkpoint writer, a data worker),
which imports its parent's main module again under the name ``__mp_main__``, comes here first: it gets the platform
room before anything else, and then the script's own definitions.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import stat
import sys
import tempfile
import warnings
from contextlib import suppress
from types import CodeType, ModuleType

SCRIPT_ENV = "MOEVEMENT_SCRIPT"
"""Absolute path of the script that this process, and the processes it spawns, run."""


def run_rank(argv: list[str]) -> None:
    """Run ``argv[0]`` with the rest as its arguments, as if ``python`` had started it, with the fork active.

    Returns when the script has come to its end, a planned ``sys.exit(0)`` included.

    Raises:
        SystemExit: with the script's code, or with 2 after one line on stderr for what the user can mend.
    """
    from megatron.moevement.children import end_with_parent

    end_with_parent()
    from megatron.moevement import config_file
    from megatron.moevement.activate import activate
    from moevement_core.exit_codes import exit_cleanly

    script = os.path.abspath(argv[0])
    os.environ[SCRIPT_ENV] = script
    try:
        with exit_cleanly():
            # What every thread does, for whoever wonders why nothing goes on: kill -USR1 PID.
            faulthandler.register(signal.SIGUSR1, chain=False)
            _warn_once()
            sys.argv = [script, *config_file.expand(argv[1:])]
            activate()
            _set_threads()
            _run_script(script)
    except SystemExit as exit_:
        if exit_.code not in (0, None):
            raise


def end_groups() -> None:
    """Destroy what process groups there are still; before the interpreter of a rank ends.

    Torch ends a process that leaves them with "terminate called without an active exception", now and then (pytorch
    issue 190489). Megatron leaves them. A forked rank ends without destructors, and needs it not.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def run_forked_rank(argv: list[str]) -> None:
    """:func:`run_rank` in a process that was forked."""
    # The launcher turns signals into exceptions; a rank that is ended must simply end.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.SIG_DFL)
    # Ctrl-C reaches every process of the terminal; the launcher answers it for all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tempfile.tempdir = None  # TMPDIR is this rank's own now
    _close_sockets()
    run_rank(argv)


def _warn_once() -> None:
    """What libraries warn of is the same on every rank: the first one shows it. ``-W`` and PYTHONWARNINGS win."""
    if os.environ.get("RANK", "0") != "0" and not sys.warnoptions:
        libraries = r"torch|transformers|pydantic|nvidia_resiliency_ext|megatron\.(core|training)"
        warnings.filterwarnings("ignore", module=rf"({libraries})(\.|$)")


def _close_sockets() -> None:
    """Those of the launcher's store, where it was there already: their other ends must see when the launcher ends."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if int(name) > 2 and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))


def _set_threads() -> None:
    """Torch reads OMP_NUM_THREADS at import, which in a forked rank was its parent's; sums depend on the number."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))


def _run_script(script: str) -> None:
    main = ModuleType("__main__")
    main.__spec__ = sys.modules[__name__].__spec__ if __name__ != "__main__" else __spec__
    main.__file__ = script
    sys.modules["__main__"] = main
    sys.path.insert(0, os.path.dirname(script))
    exec(_code(script), main.__dict__)


def _code(script: str) -> CodeType:
    with open(script, "rb") as file:
        return compile(file.read(), script, "exec")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m megatron.moevement.worker SCRIPT [ARGS...]")
    run_rank(sys.argv[1:])
    end_groups()
elif __name__ == "__mp_main__" and SCRIPT_ENV in os.environ:
    from megatron.moevement import platform

    platform.install()
    __file__ = os.environ[SCRIPT_ENV]
    exec(_code(__file__), globals())
