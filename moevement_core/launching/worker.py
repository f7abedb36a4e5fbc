"""Code of a process that runs a training script as a rank or a spare, and the kinds of scripts that there are."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import signal
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from moevement_core.errors import ConfigError
from moevement_core.launching import config_file
from moevement_core.launching.children import Program, end_with_parent, end_workers, ignore_asking
from moevement_core.rendezvous.job_code import SCRIPT_ENV, packages, script_text
from moevement_core.rendezvous.status_page import own_page
from moevement_core.util.environment import PARENT_ENV
from moevement_core.util.exit_codes import exit_cleanly
from moevement_core.util.extras import is_installed
from moevement_core.util.output import never_fails
from moevement_core.util.variables import check_variables

SETTLE_S = 5.0
"""Longest time in seconds that a new process idles while its supervisor tells it to wait."""


@dataclass(frozen=True)
class TrainerKind:
    """Kind of training script (Megatron's, or a script in plain torch), with the functions that start its processes."""

    module: str
    """Module that a fresh interpreter runs with ``-m``, before the script and its arguments."""
    run_rank: Callable[[list[str]], None]
    """Function that runs a script in this process; its argument is the list of the script and its arguments."""
    preload: Callable[[], None]
    """Function that imports everything that a rank needs. The launcher calls it once and then forks ranks, so that they
    start at once."""
    uses_gpus: Callable[[], bool]
    """Function that returns True if ranks on this host use GPUs."""
    switch: str | None = None
    """Flag that makes a script fault tolerant; None if scripts of this kind always are."""
    refuse: Callable[[Sequence[str], int], None] = lambda argv, ranks: None
    """Function that raises ConfigError if a script cannot run with its arguments and this number of ranks.

    The launcher calls it before it starts any rank, so it finds only mistakes that can be found without ranks.
    """

    def count_devices(self) -> int:
        """Return the number of accelerators that this process sees; 0 if ranks run on CPUs."""
        if not self.uses_gpus():
            return 0
        import torch

        return int(torch.cuda.device_count())

    def program(self, argv: list[str], *, fresh_interpreters: bool) -> Program:
        """Return the program of a rank: on GPUs a fresh interpreter, on CPUs a fork of this process.

        Args:
            argv: the script and its arguments.
            fresh_interpreters: True for a fresh interpreter on CPUs too.
        """
        if fresh_interpreters or self.uses_gpus():
            return Program(command=[sys.executable, "-m", self.module, *argv])
        self.preload()
        if is_installed("nvidia_resiliency_ext"):
            import_module("moevement_core.restart.restarts")  # Jobs with spares import it.
        packages()  # Ranks forked from here inherit its cached result.
        # An earlier job in this process may have left objects with threads in reference cycles. A forked rank would
        # crash if it collected these objects.
        gc.collect()
        gc.freeze()  # Garbage collections in the ranks skip these objects, and so copy none of their pages.
        # Triton 3.9 prints a report of two dozen lines if reference cycles stay until the launcher ends. Forked ranks
        # end without exit handlers.
        atexit.register(gc.unfreeze)
        return Program(run_forked, (self.run_rank, argv))


def run_script(
    argv: list[str], spec: ModuleSpec | None, prepare: Callable[[], None], quiet: Sequence[str] = ()
) -> None:
    """Run the script ``argv[0]`` with the rest as its arguments, as if ``python`` had started it.

    The function returns when the script has reached its end or has called ``sys.exit(0)``.

    Args:
        argv: the script and its arguments, including ``--config`` files.
        spec: specification of the main module; a process that this process spawns imports that module first.
        prepare: function that is called right before the script.
        quiet: libraries whose warnings only rank 0 shows.

    Raises:
        SystemExit: the script has ended with an exit code other than 0. The exit code is 2, after one line on stderr,
            for an error that the user can correct.
    """
    if PARENT_ENV in os.environ:  # The launcher handles the signals. Without a launcher, signals end this process.
        ignore_asking()
    never_fails()
    with exit_cleanly():
        check_variables()
    end_with_parent()
    _settle()
    script = os.path.abspath(argv[0])
    os.environ[SCRIPT_ENV] = script
    try:
        with exit_cleanly():
            # For users who examine a hang: kill -USR1 PID prints the stacks of all threads.
            faulthandler.register(signal.SIGUSR1, chain=False)
            _warn_once(quiet)
            sys.argv = [script, *config_file.expand(argv[1:])]
            prepare()
            _set_threads()
            _execute(script, spec)
    except SystemExit as exit_:
        if exit_.code not in (0, None):
            raise
    finally:
        end_workers()


def end_groups() -> None:
    """Destroy the process groups that still exist, right before the interpreter of a rank ends.

    Megatron leaves its groups. Torch then sometimes ends the process with "terminate called without an active
    exception" (pytorch issue 190489). A forked rank does not need this, because it ends without destructors.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def run_forked(run_rank: Callable[[list[str]], None], argv: list[str]) -> None:
    """Call ``run_rank`` with ``argv`` in a forked process, without the sockets and temporary folder of the launcher."""
    tempfile.tempdir = None  # tempfile then reads TMPDIR, which is set for this rank.
    _close_sockets()
    run_rank(argv)


def code_of(script: str) -> CodeType:
    """Return the compiled code of a script, from its text as the launcher read it."""
    return compile(script_text(script), script, "exec")


def _settle() -> None:
    deadline = time.monotonic() + SETTLE_S
    while (page := own_page()) is not None and page.is_waiting and time.monotonic() < deadline:
        time.sleep(0.05)


def _warn_once(libraries: Sequence[str]) -> None:
    """Silence warnings of libraries on all ranks but rank 0, because all ranks have the same warnings.

    ``-W`` and PYTHONWARNINGS override this.
    """
    if os.environ.get("RANK", "0") != "0" and not sys.warnoptions:
        warnings.filterwarnings("ignore", module=rf"({'|'.join(('torch', 'nvidia_resiliency_ext', *libraries))})(\.|$)")


def _close_sockets() -> None:
    """Close the sockets that this fork has inherited from the launcher.

    As long as a copy of a socket is open here, the process at the other end cannot see that the launcher has ended.
    """
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if int(name) > 2 and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))


def _set_threads() -> None:
    """Set torch's number of threads from OMP_NUM_THREADS, because sums of floats depend on the number of threads.

    Torch reads the variable only when it is imported. A forked rank has inherited torch from its parent, so this
    function has to set the number.
    """
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))


def _execute(script: str, spec: ModuleSpec | None) -> None:
    main = ModuleType("__main__")
    main.__spec__ = spec
    main.__file__ = script
    sys.modules["__main__"] = main
    sys.path.insert(0, os.path.dirname(script))
    exec(code_of(script), main.__dict__)


# Scripts in plain torch


def _run_plain_rank(argv: list[str]) -> None:
    from moevement_core.restart.in_process import is_restarted_in_process, was_entered

    run_script(argv, None, lambda: None)
    if is_restarted_in_process() and not was_entered():
        with exit_cleanly():
            raise ConfigError(
                f"--spares with --trainer torch: {argv[0]} never called moevement_core.train(); bind its trainer "
                "as in examples/plain_torch/train.py, or leave --spares out"
            )


def _preload_torch() -> None:
    # Torch's optimizers import torch._dynamo at their first step.
    for late in ("torch._dynamo", "moevement_core.session.loop"):
        import_module(late)


def _has_gpus() -> bool:
    import torch

    return bool(torch.cuda.is_available())


TORCH = TrainerKind("moevement_core.launching.worker", _run_plain_rank, _preload_torch, _has_gpus)
"""Kind of scripts without Megatron, which describe their own trainer in plain torch to the engine."""


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m moevement_core.launching.worker SCRIPT [ARGS...]")
    _run_plain_rank(sys.argv[1:])
    end_groups()
