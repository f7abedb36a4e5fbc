"""Every --moevement flag with a number takes the values of its range, and its configuration refuses others by name."""

from __future__ import annotations

import argparse
from typing import NoReturn

import pytest

from moevement_core.audit.config import AuditConfig
from moevement_core.elastic.config import ElasticConfig, SlotsConfig
from moevement_core.engine.config import BudgetConfig
from moevement_core.errors import ConfigError
from moevement_core.monitoring.config import MetricsConfig
from moevement_core.rendezvous.config import TimeoutsConfig
from moevement_core.replication.config import CopiesConfig
from moevement_core.restart.drills import DrillConfig
from moevement_core.speed.config import SpeedConfig
from moevement_core.storage.config import DiskConfig, RollbackConfig
from moevement_core.strategies.config import StrategyConfig
from moevement_core.trainer.config import add_session_flags
from moevement_core.util.flags import add_flags, flags_of, from_args
from moevement_core.util.numbers import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Range
from tests.bad_input.command import unnamed
from tests.unit.range_edges import BELOW_ONE, NO_NUMBER, NO_WHOLE_NUMBER, PART, WITHIN_ONE, edges

OR_ENDLESS = Range(0.0, is_open=True, or_infinite=True)
"""Range above 0 that includes infinity."""
ITERATIONS = Range(1, 128)
RANGES: dict[type, dict[str, Range]] = {
    StrategyConfig: {
        "--moevement-window": ITERATIONS, "--moevement-order-alpha": BELOW_ONE,
        "--moevement-reorder-threshold": NOT_NEGATIVE, "--moevement-reorder-fraction": SHARE,
        "--moevement-dense-interval": ITERATIONS, "--moevement-snapshot-experts": AT_LEAST_ONE,
        "--moevement-persist-experts": AT_LEAST_ONE, "--moevement-plt-limit": PART,
        "--moevement-capacity-boost": PART, "--moevement-overhead-cap": WITHIN_ONE,
    },
    CopiesConfig: {
        "--moevement-replicas": NOT_NEGATIVE, "--moevement-ranks-per-node": AT_LEAST_ONE,
        "--moevement-streams": Range(1, 16),
    },
    BudgetConfig: {
        "--moevement-host-memory-gb": OR_ENDLESS, "--moevement-log-memory-gb": OR_ENDLESS,
        "--moevement-bandwidth": POSITIVE, "--moevement-network-bandwidth": POSITIVE,
    },
    DiskConfig: {
        "--moevement-load-iteration": NOT_NEGATIVE, "--moevement-keep-windows": Range(2),
        "--moevement-keep-windows-every": AT_LEAST_ONE,
    },
    TimeoutsConfig: {
        "--moevement-peer-timeout": OR_ENDLESS, "--moevement-lease-seconds": Range(1.0),
        "--moevement-health-seconds": Range(1.0),
    },
    DrillConfig: {
        "--moevement-wipe-at": AT_LEAST_ONE, "--moevement-inject-mtbf": OR_ENDLESS,
        "--moevement-inject-speedup": OR_ENDLESS,
    },
    MetricsConfig: {"--moevement-metrics-port": Range(1, 65535)},
    AuditConfig: {"--moevement-audit-interval": AT_LEAST_ONE},
    RollbackConfig: {
        "--moevement-rollback-on-spike": Range(1.0, is_open=True), "--moevement-rollback-by": Range(2),
    },
    SpeedConfig: {"--moevement-slow-factor": Range(1.05), "--moevement-evict-slow-seconds": OR_ENDLESS},
    ElasticConfig: {"--moevement-join-wait": NOT_NEGATIVE},
    SlotsConfig: {
        "--moevement-expert-slots": AT_LEAST_ONE, "--moevement-min-replicas": AT_LEAST_ONE,
        "--moevement-rebalance-interval": AT_LEAST_ONE,
    },
}  # fmt: skip
UNCHECKED = {"--moevement-wipe-stages", "--moevement-inject-seed"}
"""Flags without a range: test_session_config compares stages with those of the job; any whole number is a seed."""
WHOLE_TEXTS = ("--moevement-window", "--moevement-metrics-port", "--moevement-snapshot-experts")
"""Flags that take words, too. Their own check, and not argparse, parses the whole number."""
WITH = {
    "--moevement-dense-interval": "dense", "--moevement-snapshot-experts": "moc", "--moevement-persist-experts": "moc",
    "--moevement-plt-limit": "moc", "--moevement-capacity-boost": "moetion", "--moevement-overhead-cap": "checkfreq",
}  # fmt: skip
"""Strategy that each flag belongs to; the other flags belong to the default strategy or to all."""
NOUNS = {"--moevement-order-alpha": "alpha"}
"""Nouns by which a message names a value, for flags that it does not name."""


class Parser(argparse.ArgumentParser):
    """Parser that raises its error message instead of printing it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


@pytest.fixture(scope="module")
def parser() -> Parser:
    session_parser = Parser(add_help=False)
    add_session_flags(session_parser.add_argument_group("moevement"), has_switch=True)
    add_flags(session_parser, SlotsConfig)
    return session_parser


def test_every_flag_with_a_number_has_a_range(parser: Parser) -> None:
    typed = {action.option_strings[0] for action in parser._actions if action.type not in (None, str)}
    tried = {flag for ranges in RANGES.values() for flag in ranges}
    assert typed <= tried | UNCHECKED
    declared = {config: {flag.name for _, flag in flags_of(config)} for config in RANGES}
    assert not {flag for config, ranges in RANGES.items() for flag in ranges if flag not in declared[config]}


@pytest.mark.parametrize(
    ("config", "flag"), [pytest.param(config, flag, id=flag) for config, ranges in RANGES.items() for flag in ranges]
)
def test_a_flag_takes_its_range_and_no_more(config: type, flag: str, parser: Parser) -> None:
    (action,) = [entry for entry in parser._actions if flag in entry.option_strings]
    is_whole = action.type is int or flag in WHOLE_TEXTS
    words = ["--moevement-strategy", WITH[flag]] if flag in WITH else []

    def refusal(value: object) -> str | None:
        try:
            from_args(config, parser.parse_args([*words, f"{flag}={value}"]))
        except ConfigError as error:
            return str(error)
        return None

    tried = edges(RANGES[config][flag], is_whole=is_whole)
    for value in tried.inside:
        assert refusal(value) is None, value
    for value in tried.outside:
        text = refusal(value)
        assert text is not None, value
        assert not unnamed(text, [NOUNS.get(flag, flag) if value == 1.0 else flag, value]), text
    for word in NO_WHOLE_NUMBER if is_whole else NO_NUMBER:
        text = refusal(word)
        assert text is not None, word
        assert not unnamed(text, [flag, word]), text
