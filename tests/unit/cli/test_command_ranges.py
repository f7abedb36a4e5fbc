"""Every flag with a number, of every command, takes the values of its range and refuses others by name.

A test stops a command where its work begins, so both ends of each range take milliseconds. tests/bad_input checks what
a refusal looks like on a terminal.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest

from moevement_cli.main import COMMANDS
from moevement_cli.units import seconds
from moevement_core.errors import ConfigError
from moevement_core.util.numbers import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Range
from tests.bad_input.command import Needs, filled, named_in_plan, named_in_simulate, unnamed
from tests.unit.range_edges import BELOW_ONE, NO_NUMBER, NO_WHOLE_NUMBER, PART, Edges, edges

OR_NEVER = Range(0.0, or_infinite=True)
"""Range of a time in seconds that may be infinite."""
AT_LEAST_TWO = Range(2)


@dataclass(frozen=True)
class Command:
    """Command with some of its flags that take numbers, and the range of each."""

    name: str
    words: str
    """Command line, with ``{given}`` in place of the flag under test."""
    work: str
    """Dotted name of the function that the command calls first after all checks."""
    ranges: dict[str, Range | Edges]
    named: Callable[[str, float], Needs] = lambda flag, value: [flag, value]
    """Function that returns what a message about a flag and a value must name."""


TRIED = (
    Command(
        "launch", "launch --nproc 1 --trainer torch {given} {script}", "moevement_core.launching.launch.use_file_mode",
        {
            "--nproc": AT_LEAST_ONE, "--spares": NOT_NEGATIVE, "--ranks-per-node": AT_LEAST_ONE,
            "--spare-timeout": OR_NEVER, "--respawn-after": OR_NEVER,
        },
    ),
    Command(
        "export", "export {given} --to {folder} {folder} {script}", "moevement_cli.export.store_at",
        {"--iteration": NOT_NEGATIVE},
    ),
    Command(
        "coordinate", "coordinate --ranks 1 {given} --nodes a -- true", "moevement_core.launching.coordinate.Signals",
        {
            "--ranks": AT_LEAST_ONE, "--port": Range(0, 65535), "--spare-timeout": OR_NEVER,
            "--tasks-per-node": AT_LEAST_ONE,
        },
    ),
    Command(
        "plan", "plan gpt_moe --ranks 96 --iteration-time 2 --cluster moevement-a100 {given}",
        "megatron.moevement.describe.describe",
        {
            "--ranks": AT_LEAST_ONE, "--iteration-time": POSITIVE, "--d2h-bandwidth": POSITIVE,
            "--copy-bandwidth": POSITIVE, "--network-bandwidth": POSITIVE, "--network-share": PART,
            "--gpus-per-node": AT_LEAST_ONE,
            "--host-memory": POSITIVE, "--replicas": NOT_NEGATIVE, "--window": AT_LEAST_ONE,
        },
        named_in_plan,
    ),
    Command(
        "simulate", "simulate laptop --strategy none {given}", "moevement_core.simulator.scenario.Scenario.costs",
        {
            "--ranks": Edges((4, 8), (-1, 0, 7)), "--iteration-time": POSITIVE, "--d2h-bandwidth": POSITIVE,
            "--copy-bandwidth": POSITIVE, "--network-bandwidth": POSITIVE, "--network-share": PART,
            "--gpus-per-node": AT_LEAST_ONE, "--host-memory": POSITIVE, "--replicas": NOT_NEGATIVE,
            "--window": AT_LEAST_ONE, "--mtbf": POSITIVE, "--hours": POSITIVE, "--seeds": AT_LEAST_ONE,
            "--first-seed": NOT_NEGATIVE, "--spares": NOT_NEGATIVE, "--detect": NOT_NEGATIVE,
            "--regroup": NOT_NEGATIVE, "--interference": NOT_NEGATIVE, "--contention": NOT_NEGATIVE, "--skew": SHARE,
            "--storage-bandwidth": POSITIVE, "--workers": AT_LEAST_ONE,
        },
        named_in_simulate,
    ),
    Command(
        "simulate", "simulate laptop --strategy none --spares 1 {given}",
        "moevement_core.simulator.scenario.Scenario.costs", {"--repair": OR_NEVER}, named_in_simulate,
    ),
    Command(
        "simulate", "simulate laptop --strategy none --trace {trace} {given}",
        "moevement_core.simulator.scenario.Scenario.costs", {"--speedup": POSITIVE}, named_in_simulate,
    ),
    Command(
        "simulate", "simulate laptop --strategy none {given}", "moevement_core.simulator.failures.FailureModel.draw",
        {"--weibull": Range(0.1, 100.0), "--together": BELOW_ONE},
        named_in_simulate,
    ),
    Command(
        "advise", "advise laptop {given}", "moevement_core.simulator.scenario.Scenario.costs",
        {
            "--ranks": Edges((4, 8), (-1, 0, 7)), "--iteration-time": POSITIVE, "--d2h-bandwidth": POSITIVE,
            "--copy-bandwidth": POSITIVE, "--network-bandwidth": POSITIVE, "--network-share": PART,
            "--gpus-per-node": AT_LEAST_ONE, "--host-memory": POSITIVE, "--replicas": NOT_NEGATIVE,
            "--seeds": AT_LEAST_ONE, "--first-seed": NOT_NEGATIVE, "--detect": NOT_NEGATIVE,
            "--regroup": NOT_NEGATIVE, "--interference": NOT_NEGATIVE, "--contention": NOT_NEGATIVE,
            "--storage-bandwidth": POSITIVE,
        },
        named_in_simulate,
    ),
    Command(
        "advise", "advise laptop {given}", "moevement_core.simulator.scenario.Scenario.costs",
        {
            "--spares": NOT_NEGATIVE, "--save-every": AT_LEAST_ONE, "--restart": NOT_NEGATIVE, "--repair": OR_NEVER,
            "--mtbf": Edges((60.0, 1e9), (0.0, -1.0)),
        },
    ),
    Command(
        "elastic", "elastic {script} {given}", "moevement_cli.elastic.changes",
        {
            "--layers": Range(1, 10_000), "--skew": Range(0.0, 99.0), "--segment": POSITIVE,
            "--experts": Range(1, 60), "--slots": AT_LEAST_ONE, "--floor": AT_LEAST_ONE, "--nodes": AT_LEAST_TWO,
            "--iteration-s": POSITIVE, "--expert-share": SHARE, "--expert-bytes": NOT_NEGATIVE,
            "--bytes-per-s": POSITIVE, "--regroup-s": NOT_NEGATIVE, "--restart-s": NOT_NEGATIVE,
            "--checkpoint-every": AT_LEAST_ONE, "--checkpoint-s": NOT_NEGATIVE, "--wait-s": NOT_NEGATIVE,
            "--rebalance-every": AT_LEAST_ONE,
        },
    ),
    Command(
        "profile", "profile --nproc 1 --output {folder}/profile.yaml {given} {script}", "moevement_cli.profile._run",
        {
            "--nproc": AT_LEAST_ONE, "--iterations": Range(8), "--saving-iterations": Range(16),
            "--micro-batch-sizes": AT_LEAST_ONE,
        },
    ),
    Command(
        "bench overhead", "bench overhead {given}", "moevement_cli.bench_overhead.samples_of",
        {
            "--nproc": Range(3), "--replicas": Range(1, 2), "--window": AT_LEAST_ONE, "--micro-batches": AT_LEAST_ONE,
            "--blocks": AT_LEAST_TWO, "--block-iterations": AT_LEAST_TWO,
        },
    ),
    Command(
        "bench replay", "bench replay {given}", "moevement_cli.bench_replay.samples_of",
        dict.fromkeys(("--nproc", "--steps", "--rounds", "--micro-batches"), AT_LEAST_ONE),
    ),
    Command(
        "bench recovery", "bench recovery {given}", "moevement_cli.bench_recovery.samples_of",
        {
            "--stages": AT_LEAST_TWO, "--micro-batches": AT_LEAST_ONE, "--window": AT_LEAST_ONE,
            "--rounds": AT_LEAST_ONE, "--kills": NOT_NEGATIVE,
        },
    ),
    Command(
        "bench ettr", "bench ettr {given}", "moevement_cli.bench_ettr._schedules",
        {
            "--mtbf": POSITIVE, "--speedup": POSITIVE, "--iterations": AT_LEAST_ONE, "--repeats": AT_LEAST_ONE,
            "--seed": NOT_NEGATIVE, "--nproc": AT_LEAST_ONE, "--spares": NOT_NEGATIVE,
        },
    ),
    Command(
        "drill", "drill --out {folder}/drill {given}", "moevement_cli.drill._drill",
        {"--at": Range(6), "--seed": NOT_NEGATIVE, "--nproc": AT_LEAST_TWO, "--kill": Range(0, 3)},
    ),
    Command(
        "top", "top {folder} {given}", "moevement_cli.top.WatchedRun",
        {"--interval": Range(0.0, is_open=True, or_infinite=True)},
    ),
)  # fmt: skip
"""Commands under test. Some bounds follow from the default of another flag, as that of --experts from --slots."""
UNCHECKED = {"drill": {"--timeout"}, "advise": {"--window"}}
"""Flags with a number, by command, that the command does not check, or always refuses."""


class Begun(Exception):
    """Exception raised in place of the work of a command, after all checks."""


class Parser(argparse.ArgumentParser):
    """Parser that raises its error message instead of printing it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


@cache
def parser_of(name: str) -> Parser:
    """Return the parser of the words that follow the name of a command."""
    parser = Parser(prog=name)
    import_module(f"moevement_cli.{name}").add_to(parser)
    return parser


def leaves(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the name and parser of a command, or of each of its subcommands if it has any."""
    actions = [entry for entry in parser._actions if isinstance(entry, argparse._SubParsersAction)]
    if not actions:
        yield name, parser
    for action in actions:
        for word, subparser in action.choices.items():
            yield f"{name} {word}", subparser


LEAVES = {leaf: parser for name in COMMANDS for leaf, parser in leaves(name, parser_of(name))}


def types_of(name: str) -> dict[str, type]:
    """Return int or float for each flag of a command that takes a number; a time is a float."""
    actions = LEAVES[name]._actions
    types = {int: int, float: float, seconds: float}
    return {action.option_strings[0]: types[action.type] for action in actions if action.type in types}


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Command, str], str | None]:
    """Return a function that runs a command with a flag up to its work and returns the message of a refusal."""
    (tmp_path / "script.py").touch()
    (tmp_path / "logs").mkdir()
    (tmp_path / "trace.csv").write_text("0,add,a\n3600000,remove,a\n")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")

    def begin(*args: object, **kwargs: object) -> NoReturn:
        raise Begun

    def run(command: Command, option: str) -> str | None:
        places = {
            "given": option, "script": tmp_path / "script.py", "folder": tmp_path, "trace": tmp_path / "trace.csv",
        }  # fmt: skip
        name, *words = (filled(word, places) for word in command.words.split())
        with monkeypatch.context() as patch:
            patch.setattr(command.work, begin)
            try:
                arguments = parser_of(name).parse_args(words)
                arguments.flags = []
                with contextlib.suppress(Begun):
                    arguments.run(arguments)
                    raise AssertionError(f"{command.work} was never called")
            except ConfigError as error:
                return str(error)
        return None

    return run


@pytest.mark.parametrize("name", LEAVES)
def test_every_flag_with_a_number_has_a_range(name: str) -> None:
    tried = [flag for command in TRIED if command.name == name for flag in command.ranges]
    assert sorted(types_of(name)) == sorted([*tried, *UNCHECKED.get(name, ())])


@pytest.mark.parametrize(
    ("command", "flag"),
    [pytest.param(case, flag, id=f"{case.name} {flag}") for case in TRIED for flag in case.ranges],
)
def test_a_flag_takes_its_range_and_no_more(
    command: Command, flag: str, refusal: Callable[[Command, str], str | None]
) -> None:
    bounds, is_whole = command.ranges[flag], types_of(command.name)[flag] is int
    tried = bounds if isinstance(bounds, Edges) else edges(bounds, is_whole=is_whole)
    for value in tried.inside:
        assert refusal(command, f"{flag}={value}") is None, value
    for value in tried.outside:
        text = refusal(command, f"{flag}={value}")
        assert text is not None, value
        assert not unnamed(text, command.named(flag, value)), text
    for word in NO_WHOLE_NUMBER if is_whole else NO_NUMBER:
        text = refusal(command, f"{flag}={word}")
        assert text is not None, word
        assert not unnamed(text, [flag, f"'{word}'"]), text
