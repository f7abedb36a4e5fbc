"""Functions of Megatron-Bridge that this project replaces or calls have their pinned signatures.

The tests need the wheel ``megatron-bridge``, which the pinned environment does not have (docs/bridge.md).
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from megatron.moevement.activate import _resolve
from megatron.moevement.bridge.activate import points
from megatron.moevement.bridge.arguments import take_flags
from tests.training import ROOT

PINNED = Path(__file__).with_name("replaced_signatures.yaml")
CALLED = (
    "megatron.bridge.models.gpt_provider.local_layer_spec",
    "megatron.bridge.training.gpt_step.forward_step",
    "megatron.bridge.training.optim.setup_optimizer",
    "megatron.bridge.training.pretrain.pretrain",
    "megatron.bridge.training.train.checkpoint_and_decide_exit",
    "megatron.bridge.training.utils.omegaconf_utils.process_config_with_overrides",
    "megatron.bridge.training.utils.train_utils.prepare_forward_step_func",
)
"""Functions that this project calls and does not replace."""

pytestmark = pytest.mark.skipif(find_spec("megatron.bridge") is None, reason="megatron-bridge is not installed")


def signatures() -> dict[str, str]:
    """Return the parameters of each function by its name; the call imports Bridge's trainer."""
    replaced = [f"{point.modules[0]}.{point.name}" for point in points(take_flags([])[0])]
    of_name = {}
    for name in (*replaced, *CALLED):
        module, _, function = name.rpartition(".")
        parameters = inspect.signature(inspect.unwrap(getattr(_resolve(module), function))).parameters.values()
        of_name[name] = ", ".join(str(each.replace(annotation=inspect.Parameter.empty)) for each in parameters)
    return of_name


def test_the_signatures_are_those_this_binding_was_written_for() -> None:
    # A process of its own imports Bridge with the stand-in for Transformer Engine.
    paths = [str(ROOT), str(ROOT / "tests" / "functional" / "bridge_job"), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"from {__name__} import *; print(json.dumps(signatures()))"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    actual = json.loads(ended.stdout.splitlines()[-1])
    pinned = yaml.safe_load(PINNED.read_text(encoding="utf-8"))
    assert actual.keys() == pinned.keys()
    for name, signature in actual.items():
        assert signature == pinned[name], f"{name} has changed; read it again, adapt its caller, and pin it again"
