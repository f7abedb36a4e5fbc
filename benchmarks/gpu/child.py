"""A process that runs one function; started by :mod:`benchmarks.gpu.processes`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.gpu.check import function_of, write_whole
from moevement_core.launching.children import end_with_parent
from moevement_core.restart.environment import PARENT_ENV


def main(name: str, arguments: str, result: str) -> None:
    """Call the function and write what it returns."""
    end_with_parent()
    os.environ.pop(PARENT_ENV, None)  # it names the parent of this process; what this one starts has another
    returned = function_of(name)(**json.loads(arguments))
    write_whole(Path(result), json.dumps(returned))
    sys.stdout.flush()
    os._exit(0)  # groups and contexts that a check has broken would be waited for


if __name__ == "__main__":
    main(*sys.argv[1:])
