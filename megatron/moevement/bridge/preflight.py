"""Refusals of what a job of Megatron-Bridge cannot do with this project; each is one line."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from megatron.moevement.preflight import refuse
from megatron.moevement.preflight.sparse import sparse_checkpoints
from moevement_core.elastic.config import SWITCH as ELASTIC
from moevement_core.errors import ConfigError

_LOADERS = ("single", "cyclic")


def refuse_without_wheel(argv: Sequence[str], ranks: int) -> None:
    """Refuse a job on a machine without Megatron-Bridge, in the launcher.

    Args:
        argv: the script and its arguments.
        ranks: number of ranks of the job.

    Raises:
        ConfigError: the package is not installed.
    """
    if find_spec("megatron.bridge") is None:
        raise ConfigError(
            "--trainer bridge: the package megatron-bridge is not installed; install it, or give --trainer megatron "
            "or torch"
        )


def check(args: Namespace, state: Any) -> None:
    """Check a job's configuration before anything is built, and raise the first complaint. Every rank calls it.

    Args:
        args: settings of the job.
        state: Bridge's ``GlobalState``.

    Raises:
        ConfigError: the job cannot run with these settings.
    """
    refuse(_without_recovery(args, state.cfg))
    refuse(sparse_checkpoints(args))
    if args.moevement_sparse_ckpt:
        refuse(_with_recovery(state.cfg))


def _without_recovery(args: Namespace, cfg: Any) -> Iterator[str]:
    """Yield complaints about settings that no job of Bridge can have here."""
    if args.moevement_elastic:
        yield f"{ELASTIC} with --trainer bridge: the job cannot change its number of ranks; leave it out"
    if args.moevement_export:
        yield "--moevement-export with --trainer bridge: windows become dense checkpoints of Megatron-LM only"
    if cfg.inprocess_restart is not None and cfg.inprocess_restart.enabled:
        yield "inprocess_restart.enabled=True: both would restart this process; set it to False"
    if cfg.ft is not None and cfg.ft.enable_ft_package:
        yield "ft.enable_ft_package=True: both would watch this process; set it to False"


def _with_recovery(cfg: Any) -> Iterator[str]:
    """Yield complaints about settings with which a recovery of a job of Bridge does not work."""
    why = "a recovery does not know how to"
    if cfg.dataset.dataloader_type not in _LOADERS:
        yield (
            f"dataset.dataloader_type={cfg.dataset.dataloader_type}: {why} read its batches again; "
            f"set one of {', '.join(_LOADERS)}"
        )
    if cfg.dist.use_decentralized_pg:
        yield f"dist.use_decentralized_pg=True: {why} replace its process groups; set it to False"
    if cfg.peft is not None:
        yield f"peft={type(cfg.peft).__name__}: {why} build its model on one rank; leave it out"
    if cfg.train.num_epochs is not None:
        yield f"train.num_epochs={cfg.train.num_epochs}: {why} count its iterations; set train_iters instead"
