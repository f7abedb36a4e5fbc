"""Flags of this project for a script of Megatron-Bridge, and Bridge's settings under the names of Megatron's flags.

The binding reads its settings from one record, whose names are those of Megatron-LM's flags. Megatron-LM fills this
record by parsing flags. For Bridge, :class:`BridgeArguments` looks each name up in Bridge's configuration.
"""

from __future__ import annotations

import argparse
import functools
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, override

from megatron.moevement import platform
from megatron.moevement.arguments import RESTART_DEFAULTS, add_arguments
from moevement_core.errors import ConfigError
from moevement_core.rendezvous.config import LEASES_TO_HANG
from moevement_core.strategies.config import RecoveryKind

_SECTIONS = (
    "model",
    "train",
    "optimizer",
    "ddp",
    "checkpoint",
    "dataset",
    "validation",
    "logger",
    "rng",
    "scheduler",
    "dist",
)
"""Sections of Bridge's configuration, in the order in which a name without an entry in :data:`_PLACES` is looked up."""
_PLACES = {
    "iteration": "train_state.step",
    "curr_iteration": "train_state.step",
    "consumed_train_samples": "train_state.consumed_train_samples",
    "consumed_valid_samples": "train_state.consumed_valid_samples",
    "skipped_train_samples": "train_state.skipped_train_samples",
    "num_floating_point_operations_so_far": "train_state.floating_point_operations_so_far",
    "do_valid": "train_state.do_valid",
    "exit_interval": "cfg.train.exit_interval",
    "iterations_to_skip": "cfg.train.iterations_to_skip",
    "barrier_with_L1_time": "cfg.optimizer.barrier_with_L1_time",
    "num_experts": "cfg.model.num_moe_experts",
    "padded_vocab_size": "cfg.model.vocab_size",
    "data_parallel_size": "cfg.data_parallel_size",
    "data_cache_path": "cfg.dataset.path_to_cache",
    "data_path": "cfg.dataset.blend",
    "per_split_data_args_path": "cfg.dataset.blend_per_split",
    "seed": "cfg.rng.seed",
    "check_for_nan_in_loss_and_grad": "cfg.ddp.check_for_nan_in_grad",
    "tokenizer_type": "cfg.tokenizer.tokenizer_type",
    "tokenizer_model": "cfg.tokenizer.tokenizer_model",
    "vocab_file": "cfg.tokenizer.vocab_file",
}
"""Attributes of Bridge's ``GlobalState`` that have other names than Megatron's flags, or several places."""
_COMPUTED: dict[str, Callable[[Any], Any]] = {
    "world_size": lambda state: int(os.environ.get("WORLD_SIZE", "1")),
    "rank": lambda state: int(os.environ.get("RANK", "0")),
    "untie_embeddings_and_output_weights": lambda state: not state.cfg.model.share_embeddings_and_output_weights,
    "group_query_attention": lambda state: state.cfg.model.num_query_groups is not None,
    "mock_data": lambda state: state.cfg.dataset.blend is None,
    "step_batch_size_schedule": lambda state: state.cfg.train.rampup_batch_size,
    "fp16": lambda state: bool(state.cfg.model.fp16),
    "bf16": lambda state: bool(state.cfg.model.bf16),
    "swiglu": lambda state: bool(state.cfg.model.gated_linear_unit),
    "perform_rl_step": lambda state: False,
    "fp4_param_gather": lambda state: bool(getattr(state.cfg.ddp, "fp4_param_gather", False)),
}
"""Functions that compute a value from Bridge's ``GlobalState``, by name of Megatron's flag."""


class BridgeArguments(Namespace):
    """Record of all settings of a job of Bridge, under the names of Megatron's flags.

    This project's own flags are attributes. Every other name is looked up in Bridge's ``GlobalState``, and so follows
    the training. The counters and the limits of the training can be set as well.

    Args:
        flags: parsed flags of this project.
        state: ``GlobalState`` of the job.
    """

    __slots__ = ("_state",)

    def __init__(self, flags: Namespace, state: Any) -> None:
        super().__init__()
        object.__setattr__(self, "_state", state)
        vars(self).update(vars(flags))

    def __getattr__(self, name: str) -> Any:
        """Return the value of a setting of Bridge.

        Raises:
            AttributeError: Bridge has no such setting.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _COMPUTED:
            return _COMPUTED[name](self._state)
        owner, attribute = self._place(name)
        return getattr(owner, attribute)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            super().__setattr__(name, value)
            return
        owner, attribute = self._place(name)
        setattr(owner, attribute, value)

    def _place(self, name: str) -> tuple[Any, str]:
        if (path := _PLACES.get(name)) is not None:
            *owners, attribute = path.split(".")
            return functools.reduce(getattr, owners, self._state), attribute
        for section in _SECTIONS:
            if hasattr(owner := getattr(self._state.cfg, section), name):
                return owner, name
        raise AttributeError(f"neither this project's flags nor the configuration of Bridge have {name!r}")


class _BridgeWords(argparse.ArgumentParser):
    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def take_flags(words: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Parse this project's flags among the arguments of a script.

    Args:
        words: arguments of the script.

    Returns:
        The parsed flags, with defaults for missing ones; and all other words, which are for the script.

    Raises:
        ConfigError: a flag has an invalid value.
    """
    parser = add_arguments(_BridgeWords(add_help=False, allow_abbrev=False))
    parser.set_defaults(**RESTART_DEFAULTS)
    if not platform.is_cpu():
        parser.set_defaults(moevement_recovery=str(RecoveryKind.AUTO))
    flags, rest = parser.parse_known_args(list(words))
    flags.inprocess_soft_timeout = LEASES_TO_HANG * flags.moevement_lease_seconds
    return flags, rest
