"""Flags that this project adds to Megatron's, defaults for a machine without a GPU, and one-line errors.

``activate`` replaces ``megatron.training.arguments.parse_args`` by :func:`parse_args_with_ours`.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from megatron.moevement import platform
from megatron.moevement.rank_order import arithmetic_of
from megatron.moevement.transformer.kernel_choice import FrozenKernels
from moevement_core.elastic.config import SlotsConfig
from moevement_core.errors import ConfigError
from moevement_core.rendezvous.config import LEASES_TO_HANG
from moevement_core.run.guarantees import Restored, of_job
from moevement_core.strategies.config import NO_STRATEGY, RecoveryKind
from moevement_core.strategies.moevement import MoEvement
from moevement_core.trainer.config import SessionConfig, add_session_flags
from moevement_core.util.environment import MEMBER_ENV
from moevement_core.util.file_modes import use_file_mode
from moevement_core.util.flags import add_flags

Parser = argparse.ArgumentParser
EXPORT = "--moevement-export"


@dataclass(frozen=True)
class RunConfig:
    """Configuration of a run from this project's flags."""

    run_dir: Path | None = None
    """Folder for the run's metrics, events and summary; None if the run writes none."""
    session: SessionConfig | None = None
    """Configuration of sparse checkpointing; None if it is off."""

    @staticmethod
    def from_args(args: argparse.Namespace) -> RunConfig:
        """Return a run's configuration from parsed flags, and apply ``--moevement-file-mode`` to this process."""
        use_file_mode(args.moevement_file_mode)  # The file mode also applies without sparse checkpointing.
        if args.moevement_export and not (args.moevement_sparse_ckpt and args.moevement_load and args.save):
            raise ConfigError(
                f"{EXPORT}: needs --moevement-sparse-ckpt, --moevement-load DIR with windows, and --save DIR for the "
                "dense checkpoint; give all three"
            )
        return RunConfig(Path(args.run_dir).absolute() if args.run_dir else None, session_config(args))


def session_config(args: argparse.Namespace) -> SessionConfig | None:
    """Return the configuration of sparse checkpointing; None if the flags turn it off or the strategy saves nothing.

    Raises:
        ConfigError: a flag has an invalid value.
    """
    if not args.moevement_sparse_ckpt or args.moevement_strategy == NO_STRATEGY:
        return None
    return SessionConfig.from_args(args, has_experts=bool(args.num_experts))


def add_arguments(parser: Parser) -> Parser:
    """Add this project's flags to Megatron's parser."""
    group = parser.add_argument_group(title="moevement")
    group.add_argument(
        "--run-dir",
        metavar="DIR",
        help="folder for the run's configuration, metrics, events, TensorBoard files and summary (default: none)",
    )
    group.add_argument(
        "--moevement-frozen-kernels",
        choices=[str(choice) for choice in FrozenKernels],
        default=str(FrozenKernels.OFF),
        help="kernels that run the experts. In a replay they skip the weight gradients of frozen experts; all other "
        "results keep their bits. auto: triton on a GPU if it supports the experts, else off; triton: Triton kernels; "
        "cuda: Triton kernels with the input gradient in CUDA C++ (compute capability 9.0); wgrad: Megatron's kernels, "
        "but a Triton kernel for the weight gradients of grouped experts; off: Megatron's kernels (default: off, until "
        "the others have trained on a GPU)",
    )
    group.add_argument(
        "--moevement-sums-in-rank-order",
        action="store_true",
        help="compute small sums over ranks (the gradient norm, gradients of norms and routers, losses) in rank order. "
        "A replacement on another node then does not change the last bits of these sums on GPUs. In exchange, each "
        "rank receives the values of all N ranks instead of one sum (docs/guarantees.md)",
    )
    group.add_argument(
        EXPORT,
        action="store_true",
        help="save the state that --moevement-load restores as a dense checkpoint in --save, and end without training "
        "(moevement export)",
    )
    add_session_flags(group, has_switch=True)
    add_flags(group, SlotsConfig)
    if find_spec("transformer_engine") is None:
        _allow_fp8_masters(parser)
    return parser


def _allow_fp8_masters(parser: Parser) -> None:
    """Add ``fp8`` to the values of ``--main-params-dtype``, for row 5 of table 7 in the paper.

    Transformer Engine's Adam does not support FP8 master weights. This project's Adam, used without Transformer Engine,
    does.
    """
    for action in parser._actions:
        if "--main-params-dtype" in action.option_strings:
            action.choices = [*(action.choices or ()), "fp8"]


@dataclass(frozen=True)
class CpuDefault:
    """Default of a flag on a machine without a GPU, where Megatron's own default would need a GPU."""

    flags: str
    dest: str
    value: Any


def cpu_defaults() -> list[CpuDefault]:
    """Return the defaults for a machine without a GPU; values on the command line override them."""
    from megatron.core.transformer.enums import AttnBackend

    return [
        CpuDefault("--distributed-backend gloo", "distributed_backend", "gloo"),
        CpuDefault("--transformer-impl local", "transformer_impl", "local"),
        CpuDefault("--attention-backend unfused", "attention_backend", AttnBackend.unfused),
        CpuDefault("--no-masked-softmax-fusion", "masked_softmax_fusion", False),
        CpuDefault("--no-bias-gelu-fusion", "bias_gelu_fusion", False),
        CpuDefault("--no-bias-swiglu-fusion", "bias_swiglu_fusion", False),
        CpuDefault("--no-bias-dropout-fusion", "bias_dropout_fusion", False),
        CpuDefault("--no-rope-fusion", "apply_rope_fusion", False),
        CpuDefault("--no-persist-layer-norm", "no_persist_layer_norm", True),
        CpuDefault("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False),
    ]


RESTART_DEFAULTS = {
    "inprocess_monitor_thread_interval": 0.5,
    "inprocess_soft_timeout": None,  # set to six lease times after parsing
}
"""Flags of Megatron's in-process restart that this project also uses, with this project's defaults."""


def parse_args_with_ours(
    original: Callable[..., argparse.Namespace],
    extra_args_provider: Callable[[Parser], Parser] | None = None,
    ignore_unknown_args: bool = False,
) -> argparse.Namespace:
    """Parse this project's flags too, and raise :class:`ConfigError` for invalid ones, in place of ``parse_args``.

    Argparse itself would print its usage and exit.
    """
    from megatron.training import global_vars

    if ignore_unknown_args and (parsed := global_vars._GLOBAL_ARGS) is not None:
        return parsed  # ``pretrain`` parses again whenever it is entered, which takes half a second.

    def provider(parser: Parser) -> Parser:
        if extra_args_provider is not None:
            parser = extra_args_provider(parser)
        parser = add_arguments(parser)
        if platform.is_cpu():
            parser.set_defaults(**{default.dest: default.value for default in cpu_defaults()})
        else:
            parser.set_defaults(moevement_recovery=None)
        if MEMBER_ENV in os.environ:
            parser.set_defaults(**RESTART_DEFAULTS)
        parser.formatter_class = _HelpWithPercentSigns
        parser.error = functools.partial(_raise_config_error, parser)  # type: ignore[method-assign]
        return parser

    args = original(provider, ignore_unknown_args)
    if args.inprocess_soft_timeout is None:
        args.inprocess_soft_timeout = LEASES_TO_HANG * args.moevement_lease_seconds
    if args.moevement_recovery is None:
        args.moevement_recovery = str(recovery_on_gpus(args))
    _fill_data(args)
    if args.run_dir and not args.tensorboard_dir:
        args.tensorboard_dir = os.path.join(args.run_dir, "tensorboard")
    return args


def recovery_on_gpus(args: argparse.Namespace) -> RecoveryKind:
    """Return the default of ``--moevement-recovery`` on GPUs: ``auto`` if a redo is possible, else ``replay``.

    A redo repeats elementwise updates, which are exact on any device. A replay repeats sums, which are not
    (:mod:`moevement_core.run.guarantees`). A redo cannot repeat Muon's updates, because they need gradients of whole
    matrices, and no rank has those.
    """
    can_redo = args.moevement_strategy == MoEvement.name and args.optimizer == "adam"
    return RecoveryKind.AUTO if can_redo else RecoveryKind.REPLAY


def remember_field_docstrings(
    known: dict[type, dict[str, str]], original: Callable[..., dict[str, str]], self: object, src_cfg_class: type
) -> dict[str, str]:
    """Look the result of ``_get_field_docstrings`` up in ``known``, so that each class is parsed only once.

    Megatron takes the help text of a flag from the source of the class that declares the flag, and parses that source
    whenever it builds a parser. Parsing takes 0.4 s of processor time in each rank. Ranks and spares that are forked
    after :func:`read_field_docstrings` inherit the results and do not parse.
    """
    if src_cfg_class not in known:
        known[src_cfg_class] = original(self, src_cfg_class)
    return dict(known[src_cfg_class])


def read_field_docstrings() -> None:
    """Build Megatron's parser once, so that forked processes build theirs without parsing sources."""
    from megatron.training.arguments import add_megatron_arguments

    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


class _HelpWithPercentSigns(argparse.HelpFormatter):
    """Formatter that accepts the bare percent signs in Megatron's help texts.

    Argparse's own formatter fails at them.
    """

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            return action.help or ""


def _raise_config_error(parser: Parser, message: str) -> NoReturn:
    unknown = re.fullmatch(r"unrecognized arguments: (.*)", message, flags=re.DOTALL)
    if unknown is None:
        raise ConfigError(message)
    words = unknown.group(1).split()
    flag = next((word for word in words if word.startswith("-")), words[0])
    if not flag.startswith("-"):
        raise ConfigError(
            f"{flag!r} is neither a flag nor a value of the flag before it; put it after the flag that it belongs to"
        )
    raise ConfigError(f"unknown flag {flag}{nearest_flag(parser, flag)}")


def nearest_flag(parser: Parser, flag: str) -> str:
    """Return a hint at the known flags that are most similar to ``flag``; a hint at --help if none is similar."""
    known = [option for action in parser._actions for option in action.option_strings]
    near = difflib.get_close_matches(flag.split("=")[0], known, n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else "; --help lists all flags"


def _fill_data(args: argparse.Namespace) -> None:
    """Set the embedded corpus as training data if no flag names data."""
    named = (
        args.data_path, args.data_args_path, args.train_data_path, args.valid_data_path, args.test_data_path,
        args.per_split_data_args_path, args.mock_data or None,
    )  # fmt: skip
    if any(source is not None for source in named):
        return
    from megatron.moevement.data import embedded

    if args.tokenizer_type not in (None, "NullTokenizer"):
        raise ConfigError(
            f"--tokenizer-type {args.tokenizer_type} without --data-path: the embedded corpus needs no tokenizer; "
            "give --data-path (moevement data build makes such files), or leave --tokenizer-type out"
        )
    if args.vocab_size not in (None, embedded.VOCAB_SIZE):
        raise ConfigError(
            f"--vocab-size {args.vocab_size} without --data-path: the embedded corpus has {embedded.VOCAB_SIZE} tokens "
            "in its vocabulary; leave the flag out or give --data-path"
        )
    corpus = embedded.corpus_prefix()
    args.data_path = [str(corpus)]
    args.tokenizer_type = "NullTokenizer"
    args.vocab_size = embedded.VOCAB_SIZE
    args.split = args.split or embedded.SPLIT


def describe_filled_in(args: argparse.Namespace) -> list[str]:
    """Return lines for rank 0's log.

    They name the flags that this module set without being asked, what is exact after a recovery on GPUs, and a
    ``--load`` folder that has no checkpoint.
    """
    from megatron.moevement.data import embedded

    lines = []
    if platform.is_cpu():
        filled = [d.flags for d in cpu_defaults() if getattr(args, d.dest) == d.value]
        lines.append("no GPU: running on the CPU with " + " ".join(filled))
    if args.data_path and Path(args.data_path[-1]) == embedded.corpus_path():
        lines.append("no --data-path: training on the embedded corpus, 190 KB of generated sentences")
    if args.moevement_sparse_ckpt and not platform.is_cpu():
        replays = args.moevement_recovery == RecoveryKind.REPLAY
        lines += of_job(arithmetic_of(args), Restored.REPLAY if replays else Restored.REDO)
    if args.load and args.ckpt_step is None and not (Path(args.load) / "latest_checkpointed_iteration.txt").exists():
        lines.append(f"no checkpoint in --load {args.load}: starting from fresh weights")
    return lines
