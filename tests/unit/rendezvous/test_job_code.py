"""A process that would run other code than the job cannot join it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moevement_core.errors import CodeDiffers
from moevement_core.rendezvous import job_code
from moevement_core.rendezvous.job_code import SCRIPT_ENV, JobCode, KeptScript, join_with_same_code, script_text
from moevement_core.rendezvous.values import Values
from moevement_core.util.environment import MEGATRON_ENV
from tests.values import LocalValues


@pytest.fixture
def values() -> LocalValues:
    return LocalValues(Values())


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "train.py"
    path.write_text("lr = 0.1\n")
    monkeypatch.setenv(SCRIPT_ENV, str(path))
    monkeypatch.delenv(job_code.SCRIPT_TEXT_ENV, raising=False)
    return path


def starts_with(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *words])


def test_the_same_code_joins_whatever_the_order_of_its_flags(
    values: LocalValues, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts_with(monkeypatch, "--lr", "0.1", "--bf16", "--data-path", "a", "b", "--data-cache-path", "/node1")
    join_with_same_code(values)
    starts_with(monkeypatch, "--bf16", "--data-path", "a", "b", "--lr=0.1", "--data-cache-path", "/node2")
    join_with_same_code(values)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--lr", "0.2"), "--lr"),
        ((), "--lr"),
        (("--lr", "0.1", "--bf16"), "--bf16"),
        (("--lr", "0.1", "extra"), "--lr"),
    ],
)
def test_other_flags_do_not_join(
    words: tuple[str, ...], flag: str, values: LocalValues, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts_with(monkeypatch, "--lr", "0.1")
    join_with_same_code(values)
    starts_with(monkeypatch, *words)
    with pytest.raises(CodeDiffers, match=flag):
        join_with_same_code(values)


def test_another_script_does_not_join_and_the_kept_one_does(
    values: LocalValues, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts_with(monkeypatch)
    kept = KeptScript(str(script))
    join_with_same_code(values)
    script.write_text("lr = 0.2\n")
    with pytest.raises(CodeDiffers):
        join_with_same_code(values)
    monkeypatch.setenv(*next(iter(kept.environment.items())))
    join_with_same_code(values)
    other = script.with_name("other.py")
    other.write_text("other")
    assert script_text(str(other)) == b"other", "only the job's script is kept"
    kept.close()


def test_modules_and_packages_that_both_have_are_compared() -> None:
    job = JobCode("s", {}, {"model": "1", "plots": "1"}, {"torch": "2.13", "moevement_core": "a"})
    assert JobCode("s", {}, {"model": "1"}, job.packages).differences(job) == []
    assert len(JobCode("s", {}, {"model": "2"}, job.packages).differences(job)) == 1
    for packages in (
        {"torch": "2.14", "moevement_core": "a"},
        {"torch": "2.13", "moevement_core": "b"},
        {"torch": "2.13"},
    ):
        assert len(JobCode("s", {}, {}, packages).differences(job)) == 1


def test_the_sources_of_a_checkout_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "model.py").write_text("layers = 1")
    monkeypatch.delenv(MEGATRON_ENV, raising=False)
    installed = job_code.packages.__wrapped__()
    monkeypatch.setenv(MEGATRON_ENV, str(tmp_path))
    before = job_code.packages.__wrapped__()
    assert installed.keys() == before.keys()
    (core / "model.py").write_text("layers = 2")
    after = job_code.packages.__wrapped__()
    assert {name for name in before if before[name] != after[name]} == {"megatron-core"}
    assert installed["megatron-core"] != before["megatron-core"]
