"""Every replaced function of Megatron: its signature is pinned, so a Megatron that moves one fails here, by name."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import yaml

from megatron.moevement import platform
from megatron.moevement.activate import _resolve, activate, points
from megatron.moevement.platform.patches import replaced

PINNED = Path(__file__).with_name("replaced_signatures.yaml")


def _original(function: Any) -> Any:
    return inspect.unwrap(getattr(function, "_moevement_original", function))


def _signatures() -> dict[str, str]:
    found = {}
    for point in points():
        function = _original(getattr(_resolve(point.modules[0]), point.name))
        names = [
            str(parameter.replace(annotation=inspect.Parameter.empty))
            for parameter in inspect.signature(function).parameters.values()
        ]
        found[f"{point.modules[0]}.{point.name}"] = ", ".join(names)
    return found


def test_the_signatures_are_those_this_fork_was_written_for() -> None:
    pinned = yaml.safe_load(PINNED.read_text())
    found = _signatures()
    assert found.keys() == pinned.keys()
    for name, signature in found.items():
        assert signature == pinned[name], f"{name} has changed; read it again, adapt its wrapper, and pin it anew"


def test_every_point_has_a_reason_and_an_existing_function() -> None:
    for point in points():
        assert len(point.reason) > 10
        for module in point.modules:
            assert callable(getattr(_resolve(module), point.name))


def test_activation_is_idempotent() -> None:
    activate()
    before = [(entry.owner, entry.name) for entry in replaced()]
    functions = [getattr(_resolve(point.modules[0]), point.name) for point in points()]
    activate()
    platform.install()
    assert [(entry.owner, entry.name) for entry in replaced()] == before
    assert [getattr(_resolve(point.modules[0]), point.name) for point in points()] == functions
