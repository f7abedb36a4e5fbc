"""Folder of the example configurations, scenarios and training script, in the wheel or beside the source."""

from __future__ import annotations

from pathlib import Path

from moevement_core.simulator import scenario

_PACKAGED = Path(__file__).parent / "_examples"
EXAMPLES = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[1] / "examples"
"""Folder with ``pretrain_moe`` and ``simulate``. setup.py copies it into the wheel."""
SCENARIOS = EXAMPLES / "simulate"


def scenario_path(name: str) -> Path | None:
    """Return the scenario file that ``name`` means, as a path or as a preset. Return None if it means no scenario."""
    for path in (Path(name), SCENARIOS / f"{name}.yaml"):
        if path.is_file():
            return path if scenario.is_scenario(path) else None
    return None


def scenarios() -> list[str]:
    """Return the names of the scenarios that come with the installation."""
    return sorted(path.stem for path in SCENARIOS.glob("*.yaml"))
