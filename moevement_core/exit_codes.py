"""How a process of ours ends: what the user did wrong is one line and 2, everything else keeps its traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from moevement_core.errors import ConfigError, DataError, MoEvementError, RunRecordError

USAGE_ERROR = 2


@contextmanager
def exit_cleanly() -> Iterator[None]:
    """Turn the errors that a user can mend into one line on stderr, from rank 0 only, and exit code 2."""
    try:
        yield
    except (ConfigError, DataError, RunRecordError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"moevement: {error}", file=sys.stderr, flush=True)
        raise SystemExit(USAGE_ERROR) from None
    except MoEvementError as error:
        print(f"moevement: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
