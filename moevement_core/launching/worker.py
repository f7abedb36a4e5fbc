"""A process that runs a training script, and the kinds of trainers that scripts may have."""

from __future__ import annotations

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
from moevement_core.exit_codes import exit_cleanly
from moevement_core.launching import config_file
from moevement_core.launching.children import Program, end_with_parent, end_workers, ignore_asking
from moevement_core.output import never_fails
from moevement_core.rendezvous.job_code import SCRIPT_ENV, packages, script_text
from moevement_core.rendezvous.status_page import own_page
from moevement_core.restart.environment import PARENT_ENV
from moevement_core.variables import check_variables

SETTLE_S = 5.0
"""How long a process that its supervisor lets wait does nothing at most."""


@dataclass(frozen=True)
class Trainer:
    """A kind of training script: what its processes are."""

    module: str
    """What a fresh interpreter runs with ``-m``, before the script and its arguments."""
    run_rank: Callable[[list[str]], None]
    """Runs the script, given it and its arguments, in this process."""
    preload: Callable[[], None]
    """Imports everything that a rank will need, so that ranks forked from here start at once."""
    uses_gpus: Callable[[], bool]
    switch: str | None = None
    """The script's flag without which it is not fault tolerant; None if it always is."""
    refuse: Callable[[Sequence[str], int], None] = lambda argv, ranks: None
    """Raises ConfigError if the script, given it with its arguments and the number of ranks, cannot begin; called
    before any rank is started, so it looks only at what needs none."""

    def count_devices(self) -> int:
        """Return how many accelerators this process sees; 0 where ranks run on CPUs."""
        if not self.uses_gpus():
            return 0
        import torch

        return int(torch.cuda.device_count())

    def program(self, argv: list[str], *, fresh_interpreters: bool) -> Program:
        """What a rank runs: forked from this process where no GPU is, unless asked otherwise."""
        if fresh_interpreters or self.uses_gpus():
            return Program(command=[sys.executable, "-m", self.module, *argv])
        self.preload()
        packages()  # ranks that are forked from here have it
        # What an earlier job in this process has left in reference cycles has threads; a fork that disposed of it would
        # crash.
        gc.collect()
        gc.freeze()  # the ranks' collections pass over what is there by now, and so copy none of its pages
        return Program(run_forked, (self.run_rank, argv))


def run_script(
    argv: list[str], spec: ModuleSpec | None, prepare: Callable[[], None], quiet: Sequence[str] = ()
) -> None:
    """Run ``argv[0]`` with the rest as its arguments, as if ``python`` had started it.

    Returns when the script has come to its end, a planned ``sys.exit(0)`` included.

    Args:
        argv: the script and its arguments, ``--config`` files among them.
        spec: of the main module that processes spawned from here import first.
        prepare: called before the script.
        quiet: libraries whose warnings only the first rank shows.

    Raises:
        SystemExit: with the script's code, or with 2 after one line on stderr for what the user can mend.
    """
    if PARENT_ENV in os.environ:  # a launcher answers them; a process that nobody started so ends by them
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
            # What every thread does, for whoever wonders why nothing goes on: kill -USR1 PID.
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
    """Destroy what process groups there are still; before the interpreter of a rank ends.

    Torch ends a process that leaves them with "terminate called without an active exception", now and then (pytorch
    issue 190489). Megatron leaves them. A forked rank ends without destructors, and needs it not.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def run_forked(run_rank: Callable[[list[str]], None], argv: list[str]) -> None:
    """``run_rank`` in a process that was forked."""
    tempfile.tempdir = None  # TMPDIR is this rank's own now
    _close_sockets()
    run_rank(argv)


def code_of(script: str) -> CodeType:
    """Return the compiled script."""
    return compile(script_text(script), script, "exec")


def _settle() -> None:
    deadline = time.monotonic() + SETTLE_S
    while (page := own_page()) is not None and page.is_waiting and time.monotonic() < deadline:
        time.sleep(0.05)


def _warn_once(libraries: Sequence[str]) -> None:
    """What libraries warn of is the same on every rank: the first one shows it. ``-W`` and PYTHONWARNINGS win."""
    if os.environ.get("RANK", "0") != "0" and not sys.warnoptions:
        warnings.filterwarnings("ignore", module=rf"({'|'.join(('torch', 'nvidia_resiliency_ext', *libraries))})(\.|$)")


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
                f"--spares with --trainer torch: {argv[0]} has ended without moevement_core.train(); bind its trainer "
                "as in examples/plain_torch/train.py, or leave --spares out"
            )


def _preload_torch() -> None:
    # Torch's optimizers import the first at their first step.
    for late in ("torch._dynamo", "moevement_core.session.loop"):
        import_module(late)


def _has_gpus() -> bool:
    import torch

    return bool(torch.cuda.is_available())


TORCH = Trainer("moevement_core.launching.worker", _run_plain_rank, _preload_torch, _has_gpus)
"""Scripts that bind their own trainer in torch (``moevement_core.session.loop``)."""


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m moevement_core.launching.worker SCRIPT [ARGS...]")
    _run_plain_rank(sys.argv[1:])
    end_groups()
