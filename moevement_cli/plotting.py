"""Figures that commands draw with matplotlib and write to a file. Errors have one line, for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moevement_cli.outputs import check_output
from moevement_core.errors import ConfigError
from moevement_core.util.extras import require

SUFFIXES = (".png", ".svg", ".pdf")
"""Suffixes of the files that a figure can be written to."""


@contextmanager
def figure(path: Path, columns: int, size: tuple[float, float], rows: int = 1) -> Iterator[Any]:
    """Yield axes to draw on, row after row, and save the figure when the block ends.

    Args:
        path: output file, with one of ``SUFFIXES``. Its folders are created.
        columns: number of axes in a row.
        size: width and height of the figure in inches.
        rows: number of rows.

    Raises:
        MissingPackage: matplotlib is not installed.
        ConfigError: the file cannot be written.
    """
    check_output("--plot", path, SUFFIXES)
    require("matplotlib", f"--plot {path}")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    drawing, axes = plt.subplots(rows, columns, figsize=size, layout="constrained")
    try:
        yield axes.ravel() if rows > 1 else axes
        drawing.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: cannot be written: {' '.join(str(error).split())}") from None
    finally:
        plt.close(drawing)
