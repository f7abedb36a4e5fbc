"""What decides which computation the processes of a job run: script, flags, modules beside the script, packages.

A launcher reads the script and its ``--config`` files once and hands both to every process that it starts, however much
later: an edit for the next experiment concerns no job that runs. Processes of other nodes, and fresh interpreters,
which import packages anew, may still differ. So the first process that joins a job records what it runs, each later one
compares itself with that, and one that differs does not join.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec
import xxhash

from moevement_core.errors import CodeDiffers, ExchangeError
from moevement_core.memory_file import MemoryFile
from moevement_core.rendezvous.signed_store import SignedStore

SCRIPT_ENV = "MOEVEMENT_SCRIPT"
"""Absolute path of the script that this process, and the processes it spawns, run."""
SCRIPT_TEXT_ENV = "MOEVEMENT_SCRIPT_TEXT"
"""``PATH:SCRIPT``, where PATH has the text of SCRIPT as the launcher read it; unset: it is read where it stands."""
CODE = "job/code"
"""Key of the store; written once by the first process that joins."""
PACKAGES = ("torch", "megatron-core", "transformer-engine", "moevement")
OURS = ("moevement_core", "megatron.moevement")
"""Packages of this project, which may be a checkout that is edited: their version says little."""
NODE_FLAGS = ("--data-cache-path", "--tensorboard-dir", "--wandb-save-dir", "--run-dir")
"""Folders, which may be others on another node without any change of what is computed."""
_MOST_SHOWN = 3


@dataclass(frozen=True)
class JobCode:
    """What one process runs."""

    script: str
    """Digest of the script's text."""
    flags: Mapping[str, Sequence[str]]
    """Values of each flag, configuration files included; the last one of a flag that is given twice."""
    modules: Mapping[str, str]
    """Digests of modules that the script had imported from its own folder when the process joined."""
    packages: Mapping[str, str]
    """Versions; of this project's own, digests of their sources, too."""

    def differences(self, job: JobCode) -> list[str]:
        """Return in words in what this process differs from the job; empty if in nothing."""
        found = ["the script is another one"] if self.script != job.script else []
        found += [
            f"{flag} {_shown(self.flags.get(flag))}, and {_shown(job.flags.get(flag))} in the job"
            for flag in sorted(self.flags.keys() | job.flags.keys())
            if flag not in NODE_FLAGS and self.flags.get(flag) != job.flags.get(flag)
        ]
        # Which modules a rank has imported by then may depend on the rank.
        found += [
            f"module {name} is another one"
            for name in sorted(self.modules.keys() & job.modules.keys())
            if self.modules[name] != job.modules[name]
        ]
        found += [
            f"{name} {self.packages.get(name, 'is missing')}, and {job.packages.get(name, 'none')} in the job"
            for name in sorted(self.packages.keys() | job.packages.keys())
            if self.packages.get(name) != job.packages.get(name)
        ]
        return found


def script_text(script: str) -> bytes:
    """Return the text of a script, as the launcher read it at the start of the job."""
    path, _, kept = os.environ.get(SCRIPT_TEXT_ENV, "").partition(":")
    with open(path if path and kept == os.path.abspath(script) else script, "rb") as file:
        return file.read()


class KeptScript:
    """Text of the job's script, in memory for as long as its launcher runs.

    Args:
        script: its path.
    """

    def __init__(self, script: str) -> None:
        self._file = MemoryFile("moevement-script", Path(script).read_bytes())
        self.environment = {SCRIPT_TEXT_ENV: f"{self._file.path}:{os.path.abspath(script)}"}
        """Variables for every process that is to run it."""

    def close(self) -> None:
        """Give it back, when no process is started any more."""
        self._file.close()


def join_with_same_code(store: SignedStore) -> None:
    """Record what this process runs, if it is the first of its job, or compare it with what the job runs.

    Raises:
        CodeDiffers: it is not the same.
    """
    mine = _code_of_this_process()
    encoded = msgspec.json.encode(mine).decode()
    recorded = store.claim(CODE, encoded)
    if recorded == encoded:
        return
    try:
        job = msgspec.json.decode(recorded, type=JobCode)
    except msgspec.MsgspecError as error:
        raise ExchangeError(f"{CODE} in the job's store: {error}; all processes need the same version") from None
    if differences := mine.differences(job):
        shown = "; ".join(differences[:_MOST_SHOWN])
        more = f"; and {len(differences) - _MOST_SHOWN} more" if len(differences) > _MOST_SHOWN else ""
        raise CodeDiffers(
            f"this process would train with other code than its job: {shown}{more}; put it back, or start a job of its "
            "own with it"
        )


def _code_of_this_process() -> JobCode:
    script = os.environ.get(SCRIPT_ENV, sys.argv[0])
    return JobCode(_digest(script_text(script)), _flags(sys.argv[1:]), _modules_beside(Path(script)), packages())


def _flags(words: Sequence[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    values: list[str] = flags.setdefault("", [])
    for word in words:
        if word.startswith("--"):
            flag, is_joined, value = word.partition("=")
            values = flags[flag] = [value] if is_joined else []
        else:
            values.append(word)
    return flags if flags[""] else {flag: values for flag, values in flags.items() if flag}


def _modules_beside(script: Path) -> dict[str, str]:
    # Thousands of modules are looked at whenever a process joins: by their names alone.
    folders = tuple({f"{script.parent.absolute()}{os.sep}", f"{script.parent.resolve()}{os.sep}"})
    digests = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if not path.startswith(folders) or path.startswith(sys.prefix) or name.startswith(("__", *OURS)):
            continue
        try:
            digests[name] = _digest(Path(path).read_bytes())
        except OSError:  # gone meanwhile; it is in memory
            continue
    return digests


@functools.cache
def packages() -> dict[str, str]:
    """Return versions of the packages that decide what is computed.

    Reads the sources of this project's packages, 2 MB; ranks that are forked after it do so no more.
    """
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for name in OURS:
        if (module := sys.modules.get(name)) is not None:
            folder = Path(next(iter(module.__path__)))
            versions[name] = _digest_of_files(sorted(folder.rglob("*.py")))
    return versions


def _digest_of_files(paths: Iterable[Path]) -> str:
    hashing = xxhash.xxh3_64()
    for path in paths:
        hashing.update(path.name.encode())
        hashing.update(path.read_bytes())
    return hashing.hexdigest()


def _digest(content: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content)


def _shown(values: Sequence[str] | None) -> str:
    return "not given" if values is None else " ".join(values) or "given"
