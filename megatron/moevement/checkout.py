"""Choice of the Megatron with which a script trains: the installed one, or a checkout of Megatron-LM.

``megatron`` is a namespace package. A checkout that comes first on the path supplies ``megatron.core`` and
``megatron.training``, while ``megatron.moevement`` still comes from this project.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from moevement_core.errors import ConfigError
from moevement_core.util.environment import MEGATRON_ENV
from moevement_core.util.versions import revision_of, versions

_CORE = "megatron.core"
TESTED_VERSION = "0.19.2"
"""Version of megatron-core with which all tests run."""
TESTED_REVISION = "d98e8a64ddf3"
"""Revision of Megatron-LM's main branch (2026-08-22, version 0.20.0) with which tests of each kind have run."""


def use(checkout: Path) -> None:
    """Use Megatron from a checkout, in this process and in processes that it starts.

    The caller must not have imported Megatron.

    Raises:
        ConfigError: the folder is no checkout, its ``megatron`` is no namespace package, or Megatron is imported
            already.
    """
    core = checkout / "megatron" / "core"
    if not (core / "__init__.py").is_file():
        raise ConfigError(
            f"--megatron {checkout}: no {core.relative_to(checkout)} in it; give a checkout of Megatron-LM"
        )
    if (checkout / "megatron" / "__init__.py").exists():
        raise ConfigError(
            f"--megatron {checkout}: the file megatron/__init__.py (as before Megatron-Core 0.6) hides "
            "megatron.moevement; give a newer checkout"
        )
    if _CORE in sys.modules:
        raise ConfigError(
            f"--megatron {checkout}: {_CORE} is already imported from {folder()}; put the checkout on PYTHONPATH"
        )
    path = str(checkout.resolve())
    sys.path.insert(0, path)
    os.environ["PYTHONPATH"] = os.pathsep.join([path, *filter(None, [os.environ.get("PYTHONPATH")])])


def note_checkout() -> None:
    """Note a checkout on the path, for records, for this process and for processes that it starts.

    The path has a checkout after :func:`use`, or if PYTHONPATH names one.
    """
    where = folder()
    if where is None or where == _installed():
        os.environ.pop(MEGATRON_ENV, None)
    else:
        os.environ[MEGATRON_ENV] = str(where)


def untested() -> str | None:
    """Return a note if no test has run with the Megatron of this process; None otherwise. Call after `note_checkout`.

    Names and signatures that this project uses are checked when a process imports Megatron, with any version.
    """
    version, checkout = versions().get("megatron-core"), os.environ.get(MEGATRON_ENV)
    if version is None or (version if checkout is None else revision_of(Path(checkout))) in (
        TESTED_VERSION,
        TESTED_REVISION,
    ):
        return None
    return (
        f"training with megatron-core {version}, which is untested; tests have run with megatron-core {TESTED_VERSION} "
        f"and with revision {TESTED_REVISION} of Megatron-LM's main branch (docs/megatron_versions.md)"
    )


def compile_helpers(folder: Path) -> None:
    """Compile ``helpers.cpp`` of Megatron's data sets for this Python, with the pybind11 that torch contains.

    A checkout has the source only. Several ranks may compile at once; each puts a complete file in place.

    Args:
        folder: folder ``megatron/core/datasets``, in which the compiled module is put.

    Raises:
        ConfigError: there is no compiler, it fails, or the folder is read-only.
    """
    import torch

    headers = (sysconfig.get_path("include"), str(Path(torch.__file__).parent / "include"))
    module = folder / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    unfinished = module.with_name(f".{module.name}.{os.getpid()}")
    command = [
        os.environ.get("CXX", "c++"),
        "-O3",
        "-shared",
        "-std=c++17",
        "-fPIC",
        *(f"-I{each}" for each in headers),
    ]
    try:
        subprocess.run(
            [*command, str(folder / "helpers.cpp"), "-o", str(unfinished)], check=True, capture_output=True, text=True
        )
        unfinished.replace(module)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0]
        raise ConfigError(
            f"{folder}/helpers.cpp cannot be compiled: {reason}; install a C++ compiler, or run make in {folder}"
        ) from None
    importlib.invalidate_caches()  # The import system has listed the folder without the module.


def folder() -> Path | None:
    """Return the folder that has the ``megatron/core`` of this process; None if ``megatron.core`` is not installed."""
    spec = importlib.util.find_spec(_CORE)
    return Path(spec.origin).resolve().parents[2] if spec is not None and spec.origin is not None else None


def passed_over(script: str) -> str | None:
    """Return a note if a script lies beside a Megatron checkout but trains with another Megatron; None otherwise."""
    beside = Path(script).resolve().parent
    if not (beside / "megatron" / "core" / "__init__.py").is_file() or folder() == beside:
        return None
    return (
        f"{script} trains with megatron.core from {_named()}, not with the checkout beside the script; "
        f"add --megatron {os.path.dirname(script) or '.'} to use that checkout"
    )


def _named() -> str:
    where = folder()
    if where is not None and where == _installed():
        return f"the installed megatron-core {metadata.version('megatron-core')}"
    return str(where)


def _installed() -> Path | None:
    """Return the folder of the installed packages that has ``megatron/core``; None if it is not installed."""
    try:
        return Path(str(metadata.distribution("megatron-core").locate_file(""))).resolve()
    except metadata.PackageNotFoundError:
        return None
