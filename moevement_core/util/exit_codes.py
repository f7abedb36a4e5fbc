"""Exit codes of this project's processes, and the conversion of errors to them.

A mistake of the user becomes one line on stderr and exit code 2. Any other error of this project becomes one line on
stderr and exit code 1. Python prints the traceback of all other exceptions.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from moevement_core.errors import CodeDiffers, ConfigError, DataError, MoEvementError, RunRecordError, VariableError

USAGE_ERROR = 2
BROKEN_DEVICE = 74
"""Exit code of a process that gives up its rank because its device is unusable (``EX_IOERR`` of sysexits.h). The job
continues with a replacement."""
DRAINED = 75
"""Exit code of a process that gives up its rank because it was asked to (``EX_TEMPFAIL`` of sysexits.h). A spare takes
the rank, and a new process takes the place of this one."""
REPLACES_ENV = "MOEVEMENT_REPLACES"
"""Environment variable with the number of the member that has ended and that this process replaces. If the variable is
set, this process prints its own errors, whatever its rank."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, by the convention of shells."""
HUNG_UP = 128 + signal.SIGHUP
"""Exit code of a command whose terminal has closed, by the convention of shells."""
_SHOWN = 200
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def exit_cleanly() -> Iterator[None]:
    """Convert errors of this project to one line on stderr and an exit code.

    Errors that a user can correct give exit code 2. Every rank finds these errors, so only rank 0 prints them. There
    are two exceptions: every process prints errors in its environment variables or code, and a process that replaces
    another process prints all of its errors. Errors that a user cannot correct give exit code 1, and every process
    prints them.

    Raises:
        SystemExit: the ``with`` block raised one of this project's errors.
    """
    try:
        yield
    except (ConfigError, DataError, RunRecordError) as error:
        is_alone = isinstance(error, VariableError | CodeDiffers) or REPLACES_ENV in os.environ
        if os.environ.get("RANK", "0") == "0" or is_alone:
            print(f"moevement: {error}", file=sys.stderr, flush=True)
        raise SystemExit(USAGE_ERROR) from None
    except MoEvementError as error:
        print(f"moevement: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


@contextmanager
def quiet_on_closed_output() -> Iterator[None]:
    """End the process quietly if the reader of standard output is gone (``| head``, a closed terminal).

    Raises:
        ConfigError: standard output cannot be written, for example because the disk is full.
        SystemExit: the reader is gone. The exit code is that of a process ended by SIGPIPE, or by SIGHUP if a terminal
            was closed.
    """
    try:
        yield
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        # A closed terminal is found by its kind of file, because isatty() returns False for it.
        is_terminal = error.errno == errno.EIO and stat.S_ISCHR(os.fstat(sys.stdout.fileno()).st_mode)
        _discard_output()
        if is_terminal:
            raise SystemExit(HUNG_UP) from None
        raise ConfigError(f"standard output cannot be written: {error.strerror}") from None


def _discard_output() -> None:
    """Discard buffered output, which the interpreter would otherwise try to write once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def files_are_given() -> Iterator[None]:
    """Convert an OSError that names a file to a ConfigError, for commands whose user gives the file names.

    Raises:
        ConfigError: the ``with`` block could not read or write a file or folder, and did not catch the OSError.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        shown = str(error.filename)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        raise ConfigError(f"{shown}: {error.strerror}; needs a file or folder that can be used") from None
