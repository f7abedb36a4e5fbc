"""Ends of this project's processes: a user's mistake is one line and code 2, everything else keeps its traceback."""

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
"""A process gave its rank back because its device cannot be used (``EX_IOERR`` of sysexits.h); the job goes on."""
REPLACES_ENV = "MOEVEMENT_REPLACES"
"""The member that ended and in whose place this process was started: it is alone in what it finds wrong."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as shells use it."""
HUNG_UP = 128 + signal.SIGHUP
"""The terminal that a command wrote to is gone, as shells have it."""
_SHOWN = 200
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def exit_cleanly() -> Iterator[None]:
    """Turn the errors that a user can mend into one line on stderr and exit code 2.

    Rank 0 prints it, for all ranks find the same. A process prints itself what it finds wrong with its own variables,
    and, where it was started in the place of another one, everything.
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
def output_may_end() -> Iterator[None]:
    """End quietly where whoever reads standard output has gone (``| head``, a terminal); in one line where it is full.

    Raises:
        ConfigError: standard output cannot be written any more.
        SystemExit: nobody reads it, with the code of a process that SIGPIPE or SIGHUP has ended.
    """
    try:
        yield
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        # One that is gone is no terminal any more to isatty().
        is_terminal = error.errno == errno.EIO and stat.S_ISCHR(os.fstat(sys.stdout.fileno()).st_mode)
        _discard_output()
        if is_terminal:
            raise SystemExit(HUNG_UP) from None
        raise ConfigError(f"the output cannot be written: {error.strerror}") from None


def _discard_output() -> None:
    """Discard buffered output, which the interpreter would try to write again, in vain, when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def files_are_given() -> Iterator[None]:
    """Turn what the system says of a file by its name into a line: whoever gave the name can mend it.

    Raises:
        ConfigError: a file or folder cannot be read or written, and nobody has said more of it.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        shown = str(error.filename)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        raise ConfigError(f"{shown}: {error.strerror}; needs a file or folder that can be used") from None
