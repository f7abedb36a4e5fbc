"""A figure that is written to a file, with one-line errors where it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moevement_cli.outputs import check_output
from moevement_core.errors import ConfigError

SUFFIXES = (".png", ".svg", ".pdf")
"""Of the files that a figure can be written to."""


@contextmanager
def figure(path: Path, columns: int, size: tuple[float, float], rows: int = 1) -> Iterator[Any]:
    """Axes beside each other, to draw on, row after row; saved at the end.

    Args:
        path: its suffix is one of ``SUFFIXES``; folders are made.
        columns: of axes.
        size: inches.
        rows: of axes.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    check_output("--plot", path, SUFFIXES)
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib; install the package with its report extra") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    made, axes = plt.subplots(rows, columns, figsize=size, layout="constrained")
    try:
        yield axes.ravel() if rows > 1 else axes
        made.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: cannot be written: {' '.join(str(error).split())}") from None
    finally:
        plt.close(made)
