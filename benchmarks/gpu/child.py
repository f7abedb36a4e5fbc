"""Process that runs one function for :mod:`benchmarks.gpu.processes`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.gpu.check import function_of, write_whole
from moevement_core.util.environment import PARENT_ENV
from moevement_core.util.parent import end_with_parent


def main(name: str, arguments: str, result: str) -> None:
    """Call the function, and write its return value to the file ``result`` as JSON."""
    end_with_parent()
    os.environ.pop(PARENT_ENV, None)  # the variable names this process's parent, and children must not inherit it
    returned = function_of(name)(**json.loads(arguments))
    write_whole(Path(result), json.dumps(returned))
    sys.stdout.flush()
    os._exit(0)  # a normal exit would wait for groups and contexts that the check broke


if __name__ == "__main__":
    main(*sys.argv[1:])
