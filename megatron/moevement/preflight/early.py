"""Checks of a script's arguments before any rank starts.

Ranks run all checks, after they have imported Megatron and parsed every flag. The few checks here need neither Megatron
nor all flags. They find the errors that a user's first short run usually has.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.moevement.preflight import refuse, sizes
from moevement_core.errors import ConfigError
from moevement_core.launching import config_file

_DEFAULTS = {
    "tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1, "context-parallel-size": 1,
    "expert-model-parallel-size": 1, "expert-tensor-parallel-size": None, "train-iters": None, "train-samples": None,
    "lr-warmup-iters": 0, "lr-warmup-samples": 0, "lr-decay-iters": None, "lr-decay-samples": None,
}  # fmt: skip
"""Flags with whole numbers that the checks read, with Megatron's defaults."""


class _Words(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(message)


def refuse_early(argv: Sequence[str], ranks: int) -> None:
    """Check a script's arguments in the launcher, and raise the first complaint.

    Args:
        argv: the script and its arguments, which may include ``--config`` files.
        ranks: number of ranks of the job.

    Raises:
        ConfigError: the job cannot start.
    """
    parser = _Words(add_help=False, allow_abbrev=False)
    for name, default in _DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for switch in ("use-checkpoint-args", "skip-train"):
        parser.add_argument(f"--{switch}", action="store_true")
    parser.add_argument("--yaml-cfg")
    words = config_file.expand(list(argv[1:]))
    try:
        args, _ = parser.parse_known_args(words)
    except ConfigError:  # A value is no whole number; Megatron's parser reports it better.
        return
    if args.use_checkpoint_args or args.yaml_cfg:  # The flags come from files that are read later.
        return
    args.world_size, args.lr = ranks, 1.0  # The ranks report a missing learning rate.
    for check in (sizes.world_size, sizes.learning_rate):
        refuse(check(args))
