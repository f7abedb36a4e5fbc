"""Check that all processes of a job run the same code: script, flags, modules beside the script, and packages.

A launcher reads the script and its ``--config`` files once, and passes both to every process that it starts. So an edit
for the next experiment does not affect a running job. Processes on other nodes, and newly started interpreters, may
still load different code. So the first process that joins a job records its code among the values of the job. Each
later process compares its own code with the record. It does not join if the two differ.
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
from moevement_core.rendezvous.values import JobValues
from moevement_core.util.environment import MEGATRON_ENV
from moevement_core.util.memory_file import MemoryFile

SCRIPT_ENV = "MOEVEMENT_SCRIPT"
"""Environment variable: absolute path of the script that this process, and the processes that it spawns, run."""
SCRIPT_TEXT_ENV = "MOEVEMENT_SCRIPT_TEXT"
"""Environment variable: ``PATH:SCRIPT``, where the file PATH holds the text of SCRIPT as the launcher read it.

If the variable is unset, a process reads the script from SCRIPT itself.
"""
CODE = "job/code"
"""Key of the code of the job; the first process that joins sets it."""
PACKAGES = ("torch", "megatron-core", "transformer-engine", "moevement")
"""Packages whose versions must be the same in all processes."""
OURS = ("moevement_core", "megatron.moevement")
"""Packages of this project. Their sources are compared, because edits in a checkout do not change the version."""
NODE_FLAGS = ("--data-cache-path", "--tensorboard-dir", "--wandb-save-dir", "--run-dir")
"""Flags that name folders. Their values may differ between nodes, because they do not change what is computed."""
_MOST_SHOWN = 3
"""Number of differences that an error message shows."""


@dataclass(frozen=True)
class JobCode:
    """Code that one process runs."""

    script: str
    """Digest of the script's text."""
    flags: Mapping[str, Sequence[str]]
    """Values of each flag, including those from configuration files; the last occurrence of a flag counts."""
    modules: Mapping[str, str]
    """Digests of the modules that the process had imported from the script's folder when it joined, by name."""
    packages: Mapping[str, str]
    """Versions of packages, and digests of the sources of this project's packages, by name."""

    def differences(self, job: JobCode) -> list[str]:
        """Return descriptions of the differences between this code and the code of the job; empty if there are none."""
        descriptions = ["the script differs"] if self.script != job.script else []
        descriptions += [
            f"{flag} {_shown(self.flags.get(flag))} here, but {_shown(job.flags.get(flag))} in the job"
            for flag in sorted(self.flags.keys() | job.flags.keys())
            if flag not in NODE_FLAGS and self.flags.get(flag) != job.flags.get(flag)
        ]
        # The modules that a process has imported by now may depend on its rank, so only common modules are compared.
        descriptions += [
            f"module {name} differs"
            for name in sorted(self.modules.keys() & job.modules.keys())
            if self.modules[name] != job.modules[name]
        ]
        descriptions += [
            f"{name} {self.packages.get(name, 'not installed')} here, but {job.packages.get(name, 'not installed')} "
            "in the job"
            for name in sorted(self.packages.keys() | job.packages.keys())
            if self.packages.get(name) != job.packages.get(name)
        ]
        return descriptions


def script_text(script: str) -> bytes:
    """Return the text of a script: the launcher's copy if the launcher read it, else the content of the file."""
    path, _, kept = os.environ.get(SCRIPT_TEXT_ENV, "").partition(":")
    with open(path if path and kept == os.path.abspath(script) else script, "rb") as file:
        return file.read()


class KeptScript:
    """Text of the job's script, which its launcher keeps in memory. Processes that start later read it from there.

    Args:
        script: path of the script.
    """

    def __init__(self, script: str) -> None:
        self._file = MemoryFile("moevement-script", Path(script).read_bytes())
        self.environment = {SCRIPT_TEXT_ENV: f"{self._file.path}:{os.path.abspath(script)}"}
        """Environment variables with which a process finds the kept text; the launcher sets them for every process."""

    def close(self) -> None:
        """Release the memory that holds the text. The launcher calls this when it starts no more processes."""
        self._file.close()


def join_with_same_code(values: JobValues) -> None:
    """Compare the code of this process with the code of its job. The first process of a job records its own code.

    Raises:
        CodeDiffers: the code of this process differs from the recorded code.
        ExchangeError: the recorded code cannot be decoded.
    """
    own_code = _code_of_this_process()
    encoded = msgspec.json.encode(own_code).decode()
    recorded = values.claim(CODE, encoded)
    if recorded == encoded:
        return
    try:
        job = msgspec.json.decode(recorded, type=JobCode)
    except msgspec.MsgspecError as error:
        raise ExchangeError(
            f"value {CODE} of the job cannot be decoded: {error}; all processes need the same version of moevement"
        ) from None
    if differences := own_code.differences(job):
        shown = "; ".join(differences[:_MOST_SHOWN])
        more = f"; and {len(differences) - _MOST_SHOWN} more differences" if len(differences) > _MOST_SHOWN else ""
        raise CodeDiffers(
            f"the code of this process differs from the code of its job: {shown}{more}; restore the job's code, or "
            "start a new job with the changed code"
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
    # Every process checks thousands of modules when it joins. The comparison of path prefixes quickly excludes most.
    folders = tuple({f"{script.parent.absolute()}{os.sep}", f"{script.parent.resolve()}{os.sep}"})
    digests = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if not path.startswith(folders) or path.startswith(sys.prefix) or name.startswith(("__", *OURS)):
            continue
        try:
            digests[name] = _digest(Path(path).read_bytes())
        except OSError:  # The file was removed after the import.
            continue
    return digests


@functools.cache
def packages() -> dict[str, str]:
    """Return versions of the packages on which computed results depend, and digests of this project's packages.

    The function reads all sources of this project, about 2 MB, and caches the result. Ranks that are forked later from
    this process inherit the result. The sources of a checkout of Megatron-LM, about 15 MB, replace its version.
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
    if checkout := os.environ.get(MEGATRON_ENV):
        versions["megatron-core"] = _digest_of_files(
            path
            for package in ("core", "training")
            for path in sorted((Path(checkout) / "megatron" / package).rglob("*.py"))
        )
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
