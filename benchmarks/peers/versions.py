"""Versions of the packages in the peers' environment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

PACKAGES = ("torch", "torchft-nightly", "nvidia-resiliency-ext", "lm-resiliency")
_QUESTION = """
import importlib.metadata, json, pathlib, sys
sys.path.append(str(pathlib.Path(sys.prefix, "lm_resiliency")))
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))
"""


def versions_of(python: Path) -> dict[str, str]:
    """Return the versions of :data:`PACKAGES` in the environment of this interpreter; empty without one."""
    if not python.exists():
        return {}
    printed = subprocess.run([python, "-c", _QUESTION, *PACKAGES], check=True, capture_output=True, text=True).stdout
    return dict(json.loads(printed))
