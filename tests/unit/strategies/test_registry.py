"""A strategy is one file, and one line of the registry."""

from __future__ import annotations

import re
from typing import Any

import pytest

from moevement_core.errors import ConfigError
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.policy.schedule import Schedule
from moevement_core.strategies import registry
from moevement_core.strategies.config import StrategyConfig
from moevement_core.strategies.dense import Dense
from moevement_core.strategies.strategy import Measured, StageOperators
from moevement_core.util.flags import flags_of

TABLE = OperatorTable(
    Operator(expert_name(0, number), OperatorKind.EXPERT, StateBytes(200, 400, 800, 400)) for number in range(4)
)


class Doubling(Dense):
    """Strategy that doubles its interval whenever it decides; a user may give the first interval."""

    name = "doubling"
    flags = frozenset({"dense_interval"})
    interval_by_default = 3

    @classmethod
    def of(cls, config: StrategyConfig, stage: StageOperators) -> Doubling:
        strategy = cls(stage.table, config.interval)
        strategy.settled = False
        return strategy

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        return (2 * now.size,)


@pytest.fixture(autouse=True)
def doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.STRATEGIES, Doubling.name, f"{__name__}:{Doubling.__name__}")


def config(name: str, **changed: Any) -> StrategyConfig:
    """Return the flags of a strategy with their defaults, except for ``changed``."""
    values = {entry.name: flag.check(flag.name, flag.default) for entry, flag in flags_of(StrategyConfig)}
    return StrategyConfig(**values | changed | {"name": name})


@pytest.mark.parametrize("asked", [None, 5])
def test_a_strategy_with_a_line_in_the_registry_is_made_from_its_flags(asked: int | None) -> None:
    strategy = config("doubling", dense_interval=asked).of(StageOperators(TABLE))
    assert isinstance(strategy, Doubling)
    now = strategy.first(0, most=4)
    assert now.size == (asked or Doubling.interval_by_default)
    measured = Measured(1.0, d2h_bytes_per_s=1e9, replication_bytes_per_s=1e9, replicas=1)
    assert strategy.propose(now, strategy.wanted_sizes(now, measured)).schedules[0].size == 2 * now.size


def test_flags_that_have_no_effect_on_it_are_refused_with_the_names_of_those_that_have_them() -> None:
    for field, value, flag in (
        ("overhead_cap", 0.1, "--moevement-overhead-cap 0.1"),
        ("window", 4, "--moevement-window 4"),
    ):
        with pytest.raises(ConfigError, match=rf"{re.escape(flag)}\b.*\bdoubling\b.*\bmoevement\b"):
            config("doubling", **{field: value})
    with pytest.raises(ConfigError, match=r"--moevement-dense-interval 4\b.*\bgemini\b.*\bdoubling$"):
        config("moevement", dense_interval=4)


def test_the_help_names_the_defaults_of_the_strategies() -> None:
    help_of = {entry.name: flag.help for entry, flag in flags_of(StrategyConfig)}
    for name in registry.names():
        kind = registry.strategy_class(name)
        if name != Doubling.name and kind.cap_by_default is not None:
            assert str(kind.cap_by_default) in help_of["overhead_cap"], name
        if name != Doubling.name and kind.interval_by_default is not None:
            assert re.search(rf"\b{kind.interval_by_default}\b.*\b{name}\b", help_of["dense_interval"]), name
