"""The version of a checkout of Megatron-LM names its folder and revision."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from moevement_core.util.environment import MEGATRON_ENV
from moevement_core.util.versions import revision_of, version_line, version_of_checkout, versions

PACKAGE_INFO = "MAJOR = 0\nMINOR = 21\nPATCH = 3\nPRE_RELEASE = 'rc1'\n"


def _checkout(folder: Path) -> Path:
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text(PACKAGE_INFO)
    return folder


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_checkout_has_version_folder_and_revision(tmp_path: Path) -> None:
    folder = _checkout(tmp_path / "checkout")
    assert version_of_checkout(folder) == f"0.21.3rc1 from {folder}"
    _git(folder, "init", "--quiet")
    assert revision_of(folder) is None
    _git(folder, "add", ".")
    _git(folder, "commit", "--quiet", "--message", "first")
    assert version_of_checkout(folder).endswith(_git(folder, "rev-parse", "HEAD")[:12])
    assert revision_of(folder / "megatron") is None


def test_a_folder_without_a_version_is_named(tmp_path: Path) -> None:
    assert version_of_checkout(tmp_path).split() == ["?.?.?", "from", str(tmp_path)]


def test_the_checkout_replaces_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEGATRON_ENV, raising=False)
    installed = versions()
    monkeypatch.setenv(MEGATRON_ENV, str(_checkout(tmp_path)))
    assert versions() == installed | {"megatron-core": version_of_checkout(tmp_path)}
    assert str(tmp_path) in version_line()
