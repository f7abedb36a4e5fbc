"""Training script whose replays also compute the weight gradients of frozen operators, which the optimizer then drops.

The script to run follows on the command line. ``benchmarks/papers/ablation.py`` compares it with usual replays.
"""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    """Run the script on the command line, without freezing any operator."""
    from megatron.moevement.transformer.frozen import FrozenMode

    def compute_all(self: FrozenMode, frozen: frozenset[str]) -> None:
        """Do nothing, so that all weights keep requiring gradients. Updates still leave frozen operators out."""

    FrozenMode.freeze = compute_all  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
