"""Settings of Megatron-Bridge under the names of Megatron's flags, and the refusals that depend on them."""

from __future__ import annotations

import re
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.moevement.bridge import preflight
from megatron.moevement.bridge.arguments import BridgeArguments, take_flags
from moevement_core.errors import ConfigError


def state(**changes: Any) -> SimpleNamespace:
    """Return the part of Bridge's ``GlobalState`` that the tests read."""
    sections: dict[str, Any] = {
        "model": SimpleNamespace(num_moe_experts=8, seq_length=32, share_embeddings_and_output_weights=False),
        "train": SimpleNamespace(exit_interval=None, micro_batch_size=2, num_epochs=None),
        "checkpoint": SimpleNamespace(save="saves"),
        "dataset": SimpleNamespace(blend=None, dataloader_type="single"),
        "dist": SimpleNamespace(use_decentralized_pg=False),
        "inprocess_restart": None, "ft": None, "peft": None,
    }  # fmt: skip
    for name in ("optimizer", "ddp", "validation", "logger", "rng", "scheduler"):
        sections[name] = SimpleNamespace()
    sections.update(changes)
    return SimpleNamespace(
        cfg=SimpleNamespace(**sections), train_state=SimpleNamespace(step=5, consumed_train_samples=20)
    )


def test_settings_are_found_under_the_names_of_megatron() -> None:
    args = BridgeArguments(Namespace(run_dir="runs/mine"), state())
    assert (args.run_dir, args.num_experts, args.seq_length, args.micro_batch_size) == ("runs/mine", 8, 32, 2)
    assert (args.iteration, args.consumed_train_samples, args.save, args.mock_data) == (5, 20, "saves", True)
    assert args.untie_embeddings_and_output_weights
    assert getattr(args, "no_such_flag", "missing") == "missing"
    assert vars(args) == {"run_dir": "runs/mine"}


def test_progress_and_limits_are_set_where_bridge_reads_them() -> None:
    bridge = state()
    args = BridgeArguments(Namespace(run_dir=None), bridge)
    args.consumed_train_samples, args.exit_interval, args.run_dir = 24, 7, "other"
    assert bridge.train_state.consumed_train_samples == 24
    assert bridge.cfg.train.exit_interval == 7
    assert args.run_dir == "other"
    with pytest.raises(AttributeError, match="no_such_flag"):
        args.no_such_flag = 1


def test_flags_of_this_project_are_taken_from_a_script() -> None:
    flags, rest = take_flags(["--mine", "3", "--moevement-sparse-ckpt", "--run-dir", "runs/mine", "other"])
    assert flags.moevement_sparse_ckpt
    assert flags.run_dir == "runs/mine"
    assert flags.inprocess_soft_timeout > 0
    assert rest == ["--mine", "3", "other"]
    with pytest.raises(ConfigError, match="--moevement-replicas"):
        take_flags(["--moevement-replicas", "many"])


@pytest.mark.parametrize(("section", "value", "named"), [
    ("dataset", SimpleNamespace(dataloader_type="batch"), r"dataset\.dataloader_type=batch.*\bsingle\b"),
    ("dist", SimpleNamespace(use_decentralized_pg=True), r"dist\.use_decentralized_pg=True"),
    ("peft", SimpleNamespace(), r"peft="),
    ("train", SimpleNamespace(num_epochs=2), r"train\.num_epochs=2.*\btrain_iters\b"),
])  # fmt: skip
def test_what_a_recovery_cannot_do_is_refused(section: str, value: Any, named: str) -> None:
    (complaint,) = preflight._with_recovery(state(**{section: value}).cfg)
    assert re.search(named, complaint)
    assert not list(preflight._with_recovery(state().cfg))


@pytest.mark.parametrize(("section", "value", "named"), [
    ("inprocess_restart", SimpleNamespace(enabled=True), r"inprocess_restart\.enabled=True"),
    ("ft", SimpleNamespace(enable_ft_package=True), r"ft\.enable_ft_package=True"),
])  # fmt: skip
def test_another_restart_is_refused(section: str, value: Any, named: str) -> None:
    flags, _ = take_flags([])
    (complaint,) = preflight._without_recovery(flags, state(**{section: value}).cfg)
    assert re.search(named, complaint)


def test_a_job_that_changes_its_ranks_is_refused() -> None:
    flags, _ = take_flags(["--moevement-elastic"])
    (complaint,) = preflight._without_recovery(flags, state().cfg)
    assert "--moevement-elastic" in complaint
