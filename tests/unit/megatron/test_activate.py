"""Functions of Megatron that this project replaces have their pinned signatures; a changed one fails here by name."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.moevement import platform
from megatron.moevement.activate import _resolve, activate, points
from megatron.moevement.patches import DECLARED, LOOKED_UP, PatchError, check_names, replace_on, replaced

PINNED = Path(__file__).with_name("replaced_signatures.yaml")


def _original(function: Any) -> Any:
    return inspect.unwrap(getattr(function, "_moevement_original", function))


def _signatures() -> dict[str, str]:
    points_ = {f"{point.modules[0]}.{point.name}": (point.modules[0], point.name) for point in points()}
    places = points_ | {f"{entry.owner}.{entry.name}": (entry.owner, entry.name) for entry in DECLARED}
    signatures = {}
    for name, (owner, attribute) in places.items():
        parameters = inspect.signature(_original(getattr(_resolve(owner), attribute))).parameters.values()
        signatures[name] = ", ".join(
            str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters
        )
    return signatures


def test_the_signatures_are_those_this_fork_was_written_for() -> None:
    pinned = yaml.safe_load(PINNED.read_text())
    signatures = _signatures()
    assert signatures.keys() == pinned.keys()
    for name, signature in signatures.items():
        versions = pinned[name] if isinstance(pinned[name], list) else [pinned[name]]
        assert signature in versions, f"{name} has changed; read it again, adapt its wrapper, and pin it again"


def test_every_point_has_a_reason_and_an_existing_function() -> None:
    for point in points():
        assert len(point.reason) > 10
        for module in point.modules:
            assert callable(getattr(_resolve(module), point.name))


def test_what_is_replaced_on_an_object_is_declared_and_exists() -> None:
    with pytest.raises(PatchError, match=r"\bother\b.*\bThing\b.*\bpatches\.py\b"):
        replace_on(Thing(), "other", lambda original: original)
    with pytest.raises(PatchError, match=r"\bThing\b.*\bget_grad_norm\b.*\bMegatron\b"):
        replace_on(Thing(), "get_grad_norm", lambda original: original)


def test_a_name_that_is_looked_up_and_was_renamed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    check_names()
    monkeypatch.setitem(LOOKED_UP, "megatron.core.optimizer.grad_scaler", ("_growth_tracker", "_gone"))
    with pytest.raises(PatchError, match=r"\bmegatron\.core\.optimizer\.grad_scaler\b.*\b_gone\b"):
        check_names()


class Thing:
    def other(self) -> None: ...


def test_activation_is_idempotent() -> None:
    activate()
    before = [(entry.owner, entry.name) for entry in replaced()]
    functions = [getattr(_resolve(point.modules[0]), point.name) for point in points()]
    activate()
    platform.install()
    assert [(entry.owner, entry.name) for entry in replaced()] == before
    assert [getattr(_resolve(point.modules[0]), point.name) for point in points()] == functions
