"""Folder of the example configurations, scenarios and training script, in the wheel or beside the source."""

from __future__ import annotations

from pathlib import Path

_PACKAGED = Path(__file__).parent / "_examples"
EXAMPLES = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[1] / "examples"
"""Folder with ``pretrain_moe`` and ``simulate``. setup.py copies it into the wheel."""
