"""Flags that pages name exist. The numbers in the comparison equal those in the benchmark pages that it cites."""

from __future__ import annotations

import argparse
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from megatron.moevement.arguments import add_arguments
from megatron.moevement.preflight import spares, sparse
from moevement_cli import main as cli
from tests.docs.commands import PAGES
from tests.training import ROOT

OF_OTHERS = {
    "--nproc-per-node",
    "--nodes",
    "--config",
    "--moevement",
    "--gpu-bind",
    "--gpus-per-task",
    "--signal",
    "--batch",
    "--job",
    "--once",
    "--version",
}
"""Flags of torchrun, Slurm and commands that start no job, the flag for a file of flags, and a bare prefix."""
OF_KILLS = ("kill to next committed iteration", "host memory of a rank")
"""Columns of benchmarks/kills.md that README shows."""
COMPARISON = ROOT / "docs" / "measured_comparison.md"


@cache
def known_flags() -> frozenset[str]:
    """Return the flags of Megatron, of this project, and of the commands that start or plan a job."""
    from megatron.training.arguments import add_megatron_arguments

    parsers = [add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))]
    for command in cli.COMMANDS:
        outer = cli._parser([command])
        (subcommands,) = (entry for entry in outer._actions if isinstance(entry, argparse._SubParsersAction))
        parsers.append(subcommands.choices[command])
    return frozenset(name for parser in parsers for action in parser._actions for name in action.option_strings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_of_ours_exist(page: Path) -> None:
    named = set(re.findall(r"--(?:moevement|inprocess)-[a-z0-9-]*[a-z0-9]", page.read_text(encoding="utf-8")))
    assert named <= known_flags(), named - known_flags()


@pytest.mark.parametrize("name", ["migration.md", "cluster.md", "runbook.md", "support.md"])
def test_every_flag_of_a_guide_exists(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text)) - OF_OTHERS
    assert named
    assert named <= known_flags(), named - known_flags()


def test_flags_that_are_refused_are_named_where_support_is_described() -> None:
    text = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    refused = {
        flag
        for refusal in (*sparse.REFUSED, *spares.REFUSED, *spares.REFUSED_ON_GPUS)
        for flag in re.findall(r"--[a-z][a-z0-9-]+", refusal.flag)
    }
    assert len(refused) > 15
    assert refused <= set(re.findall(r"--[a-z][a-z0-9-]+", text))


def test_each_alert_is_in_the_runbook() -> None:
    groups = yaml.safe_load((ROOT / "examples" / "monitoring" / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    rows = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    assert alerts
    assert alerts == set(re.findall(r"^\| `(\w+)`", rows, flags=re.MULTILINE))


def test_the_table_of_readme_is_that_of_its_pages() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Try it")[0]
    names, *measured = _cells((ROOT / "benchmarks" / "kills.md").read_text(encoding="utf-8"))
    strategies = {cells[0]: dict(zip(names, cells, strict=True)) for cells in measured}
    _, *rows = _cells(section)
    assert len(rows) == 3
    for after, seconds, repeated, memory in rows:
        strategy = strategies[after.split()[0].strip(":")]
        (kills,) = re.findall(r"of (\d+)", strategy["kills without a repeated iteration"])
        assert [seconds, memory] == [strategy[column] for column in OF_KILLS]
        assert float(repeated) == round(int(strategy["iterations repeated"]) / int(kills), 1)
    shares = re.findall(r"\d+\.\d%", section)
    assert shares
    assert set(shares) <= set(re.findall(r"\d+\.\d%", (ROOT / "docs" / "overhead_cap.md").read_text(encoding="utf-8")))


def _cells(text: str) -> list[list[str]]:
    """Return the rows of all tables of a page, without the lines below their headings."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [cells for cells in rows if set("".join(cells)) - set("- ")]


def _sections() -> list[tuple[str, str, set[str]]]:
    """Return, for each section of the comparison, its title, its source page and the numbers of its tables."""
    sections = []
    for section in COMPARISON.read_text(encoding="utf-8").split("\n## ")[1:]:
        rows = [line for line in section.splitlines() if line.startswith("|")]
        if rows:
            source = re.search(r"^From \[(benchmarks/\S+\.md)\]", section, flags=re.MULTILINE)
            assert source, section.splitlines()[0]
            sections.append(
                (section.splitlines()[0], source[1], set(re.findall(r"\d+(?:\.\d+)?", "\n".join(rows[2:]))))
            )
    return sections


@pytest.mark.parametrize(("title", "source", "numbers"), _sections(), ids=[title for title, _, _ in _sections()])
def test_numbers_of_the_comparison_are_measured_ones(title: str, source: str, numbers: set[str]) -> None:
    measured = set(re.findall(r"\d+(?:\.\d+)?", (ROOT / source).read_text(encoding="utf-8")))
    assert numbers
    assert numbers <= measured, f"{title}: {numbers - measured}"


def test_commands_and_dates_of_the_comparison_are_those_of_its_pages() -> None:
    text = " ".join(COMPARISON.read_text(encoding="utf-8").split())
    for source, command in re.findall(r"From \[(benchmarks/\S+\.md)\].*?`((?:moevement|python -m) .*?)`", text):
        page = " ".join((ROOT / source).read_text(encoding="utf-8").split())
        assert command in page, f"{source}: {command}"
