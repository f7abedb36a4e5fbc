"""Packages that only some features need. Each is in an extra of this project, beside its required packages."""

from __future__ import annotations

from importlib.util import find_spec

from moevement_core.errors import MissingPackage

_EXTRAS = {
    "megatron.core": ("megatron-core", "megatron"),
    "nvidia_resiliency_ext": ("nvidia-resiliency-ext", "restart"),
    "matplotlib": ("matplotlib", "report"),
}
"""Distribution and extra of each module that :func:`require` knows."""


def is_installed(module: str) -> bool:
    """Return True if a module can be imported; only its parent packages are imported for the answer."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def require(module: str, feature: str, otherwise: str = "") -> None:
    """Refuse a feature whose package is not installed. Features call it before they start or import anything.

    Args:
        module: module of the package, such as ``megatron.core``.
        feature: flag, command or kind of job that needs the package; the message begins with it.
        otherwise: remedy besides the installation, such as a flag; empty if there is none.

    Raises:
        MissingPackage: the module cannot be imported.
    """
    if is_installed(module):
        return
    distribution, extra = _EXTRAS[module]
    raise MissingPackage(
        f"{feature}: needs {distribution}, which is not installed; install this project with its extra {extra} "
        f"(docs/install.md)" + (f", or {otherwise}" if otherwise else "")
    )
