"""Flags of sparse checkpointing: their names, and the values and combinations that are refused."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megatron.moevement.arguments import session_config
from megatron.moevement.binding import MegatronBinding
from megatron.moevement.preflight.spares import spares
from megatron.moevement.preflight.sparse import sparse_checkpoints
from megatron.moevement.runtime.ledger import Ledger
from megatron.moevement.runtime.live import Live
from moevement_core.errors import ConfigError, PopularityError
from moevement_core.policy.popularity import Ordering
from moevement_core.replication.config import CopiesConfig
from moevement_core.saving.saving import refuse_what_is_not_defined
from moevement_core.storage.config import DiskConfig
from moevement_core.strategies import MoEvement
from moevement_core.strategies.capabilities import CountsTokens
from moevement_core.strategies.config import RecoveryKind
from moevement_core.strategies.redo import Redo
from moevement_core.strategies.strategy import StageOperators
from moevement_core.trainer.binding import Binding
from moevement_core.trainer.config import SessionConfig, add_session_flags
from tests.unit.policy.tables import equal_experts

# The set is frozen, because a renamed flag breaks users' scripts: a change of one must change this set, too.
FLAGS = {
    "--moevement-elastic", "--moevement-join-wait", "--moevement-load-iteration", "--moevement-keep-windows",
    "--moevement-keep-windows-every",
    "--moevement-bandwidth", "--moevement-health-check", "--moevement-slow-factor", "--moevement-evict-slow",
    "--moevement-evict-slow-seconds", "--moevement-audit-interval", "--moevement-audit-memory",
    "--moevement-inject-corruption", "--moevement-rollback-on-spike", "--moevement-rollback-by",
    "--moevement-health-seconds", "--moevement-host-memory-gb", "--moevement-load", "--moevement-log-memory-gb",
    "--moevement-file-mode", "--moevement-metrics-address", "--moevement-metrics-port",
    "--moevement-network-bandwidth", "--moevement-keep-own", "--moevement-protection",
    "--moevement-order", "--moevement-order-alpha", "--moevement-peer-timeout", "--moevement-persist-dir",
    "--moevement-placement", "--moevement-ranks-per-node", "--moevement-reorder-fraction",
    "--moevement-recovery", "--moevement-reorder-threshold", "--moevement-lease-seconds",
    "--moevement-replicas", "--moevement-replicas-on-same-node", "--moevement-interfaces", "--moevement-streams",
    "--moevement-strategy", "--moevement-dense-interval", "--moevement-overhead-cap", "--moevement-capacity-boost",
    "--moevement-plt-limit", "--moevement-snapshot-experts", "--moevement-selection", "--moevement-persist-experts",
    "--moevement-sparse-ckpt", "--moevement-verify", "--moevement-window", "--moevement-window-kind",
    "--moevement-wipe-at", "--moevement-inject", "--moevement-inject-flip", "--moevement-inject-mtbf",
    "--moevement-inject-seed", "--moevement-inject-trace", "--moevement-inject-speedup", "--moevement-wipe-stages",
}  # fmt: skip
MEGATRONS: dict[str, Any] = {
    "num_experts": 4, "optimizer": "adam", "optimizer_cpu_offload": False, "use_precision_aware_optimizer": False,
    "use_torch_fsdp2": False, "use_megatron_fsdp": False, "qk_clip": False, "skip_train": False,
    "cuda_graph_impl": "none", "overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False,
    "defer_embedding_wgrad_compute": False,
    "pipeline_model_parallel_size": 2,
    "moe_expert_rank_capacity_factor": None, "perform_rl_step": False, "dataloader_type": "single", "fp8": None,
    "fp8_recipe": "delayed", "fp8_param_gather": False, "fp4_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False, "overlap_param_gather": False, "world_size": 4,
    "log_num_zeros_in_grad": False,
    "nccl_ub": False, "tp_comm_overlap": False, "moe_token_dispatcher_type": "alltoall",
    "inprocess_restart": False, "moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False,
}  # fmt: skip


def parsed(*words: str, **megatrons: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_session_flags(parser.add_argument_group("moevement"), has_switch=True)
    return argparse.Namespace(**vars(parser.parse_args(["--moevement-sparse-ckpt", *words])), **(MEGATRONS | megatrons))


def test_the_set_of_flags_is_frozen_and_each_has_help() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_session_flags(parser.add_argument_group("moevement"), has_switch=True)
    assert {option for action in parser._actions for option in action.option_strings} == FLAGS
    assert all(action.help for action in parser._actions)


def test_nothing_is_on_without_the_flag() -> None:
    args = parsed()
    args.moevement_sparse_ckpt = False
    assert session_config(args) is None


@pytest.mark.parametrize(
    "words", [["--moevement-load", "d"], ["--moevement-persist-dir", "d"], ["--moevement-wipe-at", "3"]]
)
def test_flags_that_need_sparse_checkpoints_are_refused_without(words: list[str]) -> None:
    args = parsed(*words)
    args.moevement_sparse_ckpt = False
    (complaint,) = sparse_checkpoints(args)
    assert re.search(rf"{words[0]}\b.*--moevement-sparse-ckpt\b", complaint)


def test_a_stage_that_there_is_not_cannot_be_wiped() -> None:
    (complaint,) = sparse_checkpoints(parsed("--moevement-wipe-stages", "0", "2"))
    assert re.search(r"--moevement-wipe-stages 2\b.*--pipeline-model-parallel-size 2\b.*\b0\b.*\b1\b", complaint)


def test_defaults_are_the_papers() -> None:
    config = session_config(parsed())
    assert config is not None
    assert (config.strategy.window, str(config.strategy.window_kind), config.copies.replicas) == (None, "aligned", None)
    assert (config.strategy.thresholds.share_change, config.strategy.thresholds.fraction) == (0.10, 0.25)
    assert config.strategy.ordering.ordering is Ordering.HARD_COUNT
    dense = session_config(parsed(num_experts=None))
    assert dense is not None
    assert dense.strategy.ordering.ordering is Ordering.BACK_TO_FRONT


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["--moevement-window", "0"], r"--moevement-window 0\b.*\bauto\b.*\b1\b.*\b128\b"),
        (["--moevement-window", "129"], r"--moevement-window 129\b.*\bauto\b.*\b1\b.*\b128\b"),
        (["--moevement-window", "many"], "--moevement-window many"),
        (
            ["--moevement-strategy", "dense", "--moevement-window", "3"],
            r"--moevement-window 3\b.*--moevement-strategy dense\b.*--moevement-window auto\b",
        ),
        (["--moevement-dense-interval", "3"], r"--moevement-dense-interval 3\b.*--moevement-strategy moevement\b"),
        (
            ["--moevement-strategy", "dense", "--moevement-dense-interval", "0"],
            r"--moevement-dense-interval 0\b.*\b1\b.*\b128\b",
        ),
        (
            ["--moevement-strategy", "checkfreq"],
            r"--moevement-strategy checkfreq\b.*--moevement-persist-dir\b",
        ),
        (
            ["--moevement-strategy", "checkfreq", "--moevement-persist-dir", "d", "--moevement-replicas", "1"],
            r"--moevement-replicas 1\b.*--moevement-strategy checkfreq\b",
        ),
        (
            ["--moevement-strategy", "moetion", "--moevement-overhead-cap", "0.1"],
            r"--moevement-overhead-cap 0\.1\b.*--moevement-strategy\b",
        ),
        (["--moevement-strategy", "checkfreq", "--moevement-overhead-cap", "2"], "--moevement-overhead-cap 2"),
        (
            ["--moevement-snapshot-experts", "2"],
            r"--moevement-snapshot-experts 2\b.*--moevement-strategy moevement\b.*--moevement-strategy moc\b",
        ),
        (
            ["--moevement-strategy", "moc", "--moevement-snapshot-experts", "0"],
            r"--moevement-snapshot-experts 0\b.*\b1\b",
        ),
        (
            ["--moevement-strategy", "moc", "--moevement-plt-limit", "3.75"],
            r"--moevement-plt-limit 3\.75\b.*\b0\b.*\b1\b",
        ),
        (["--moevement-load-iteration", "5"], r"--moevement-load-iteration 5\b.*--moevement-load\b"),
        (["--moevement-keep-windows", "5"], r"--moevement-keep-windows 5\b.*--moevement-persist-dir\b"),
        (["--moevement-keep-windows", "1"], r"--moevement-keep-windows 1\b.*\b2\b"),
        (["--moevement-keep-windows-every", "9"], r"--moevement-keep-windows-every 9\b.*--moevement-persist-dir\b"),
        (["--moevement-bandwidth", "-3"], "--moevement-bandwidth -3"),
        (["--moevement-bandwidth", "fast"], r"--moevement-bandwidth fast\b.*\bauto\b"),
        (["--moevement-network-bandwidth", "nan"], "--moevement-network-bandwidth nan"),
        (["--moevement-order-alpha", "1.0"], r"\balpha\b.*\b1\.0\b"),
        (["--moevement-reorder-fraction", "2"], r"--moevement-reorder-fraction 2\.0\b.*\b0\b.*\b1\b"),
        (["--moevement-reorder-threshold", "-1"], r"--moevement-reorder-threshold -1\.0\b.*\b0\b"),
        (["--moevement-replicas", "-1"], "--moevement-replicas -1"),
        (["--moevement-ranks-per-node", "0"], "--moevement-ranks-per-node 0"),
        (["--moevement-host-memory-gb", "0"], "--moevement-host-memory-gb 0"),
        (["--moevement-peer-timeout", "0"], "--moevement-peer-timeout 0"),
        (["--moevement-wipe-at", "3", "0"], r"--moevement-wipe-at 0\b.*\b1\b"),
    ],
)
def test_values_that_cannot_be_are_refused(words: list[str], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        session_config(parsed(*words))


@pytest.mark.parametrize(
    "megatrons",
    [{"optimizer": "sgd"}, {"optimizer_cpu_offload": True},
     {"use_torch_fsdp2": True}, {"use_megatron_fsdp": True}, {"qk_clip": True}, {"skip_train": True},
     {"cuda_graph_impl": "local"}, {"overlap_moe_expert_parallel_comm": True}, {"delay_wgrad_compute": True},
     {"defer_embedding_wgrad_compute": True},
     {"moe_expert_rank_capacity_factor": 1.5}, {"perform_rl_step": True}, {"dataloader_type": "external"},
     {"fp4_param_gather": True},
     {"reuse_grad_buf_for_mxfp8_param_ag": True, "overlap_param_gather": True}],
)  # fmt: skip
def test_what_snapshots_cannot_see_or_a_replay_cannot_repeat_is_refused(megatrons: dict[str, Any]) -> None:
    assert not list(sparse_checkpoints(parsed()))
    (complaint,) = sparse_checkpoints(parsed(**megatrons))
    assert next(iter(megatrons)).replace("_", "-") in complaint


def test_gradients_that_are_chosen_later_cannot_be_gathered_over() -> None:
    words = ("--moevement-strategy", "moetion")
    assert not list(sparse_checkpoints(parsed(*words)))
    (complaint,) = sparse_checkpoints(parsed(*words, reuse_grad_buf_for_mxfp8_param_ag=True))
    assert re.search(r"--reuse-grad-buf-for-mxfp8-param-ag\b.*--moevement-strategy moetion\b", complaint)


@pytest.mark.parametrize(
    ("megatrons", "flag"),
    [({}, "--moe-expert-capacity-factor"),
     ({"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
      "--moe-pad-expert-input-to-capacity")],
)  # fmt: skip
def test_more_room_needs_a_capacity_that_experts_can_have_more_of(megatrons: dict[str, Any], flag: str) -> None:
    words = ("--moevement-strategy", "moetion", "--moevement-capacity-boost", "0.1")
    assert not list(sparse_checkpoints(parsed(*words, moe_expert_capacity_factor=1.0)))
    (complaint,) = sparse_checkpoints(parsed(*words, **megatrons))
    assert re.search(rf"--moevement-capacity-boost 0\.1\b.*{flag}\b", complaint)


@pytest.mark.parametrize("factor", [None, -1.0])
def test_an_order_by_capacity_needs_a_capacity(factor: float | None) -> None:
    words = ("--moevement-order", "capacity")
    assert not list(sparse_checkpoints(parsed(*words, moe_expert_capacity_factor=1.0)))
    (complaint,) = sparse_checkpoints(parsed(*words, moe_expert_capacity_factor=factor))
    assert re.search(r"--moevement-order capacity\b.*--moe-expert-capacity-factor\b.*--moevement-order hard", complaint)


def without_capabilities(**methods: Callable[..., Any]) -> Binding:
    """Return a binding that has the core's methods and no others."""
    core: dict[str, Any] = dict.fromkeys(Binding.__abstractmethods__, lambda *arguments: {})
    return type("OwnTrainer", (Binding,), core | methods)()


def test_redo_is_refused_for_a_trainer_that_does_not_define_how_it_ends() -> None:
    config = session_config(parsed("--moevement-recovery", "redo"))
    assert config is not None
    needed = r"\bOwnTrainer\b.*\bgather_replicas\(\).*--moevement-recovery replay\b"
    with pytest.raises(ConfigError, match=rf"--moevement-recovery redo\b.*{needed}"):
        refuse_what_is_not_defined(without_capabilities(), config.strategy)


def test_more_room_is_refused_for_a_trainer_that_does_not_define_it() -> None:
    words = ("--moevement-strategy", "moetion", "--moevement-capacity-boost", "0.1")
    config = session_config(parsed(*words, moe_expert_capacity_factor=1.0))
    assert config is not None
    needed = r"\bOwnTrainer\b.*\bexpert_room\(\)"
    with pytest.raises(ConfigError, match=rf"--moevement-capacity-boost 0\.1\b.*{needed}"):
        refuse_what_is_not_defined(without_capabilities(), config.strategy)


def test_an_order_by_capacity_is_refused_for_a_trainer_that_does_not_define_it() -> None:
    config = session_config(parsed("--moevement-order", "capacity"))
    assert config is not None
    live = Live()
    needed = r"\bOwnTrainer\b.*\bexpert_capacities\(\)"
    with pytest.raises(ConfigError, match=rf"--moevement-order capacity\b.*{needed}"):
        refuse_what_is_not_defined(without_capabilities(), config.strategy)
    refuse_what_is_not_defined(MegatronBinding(live, Ledger(live)), config.strategy)


def test_redo_needs_the_method_that_repeats_updates() -> None:
    config = session_config(parsed("--moevement-recovery", "redo"))
    assert config is not None
    with pytest.raises(ConfigError, match=r"--moevement-recovery redo\b.*\bOwnTrainer\b.*\bredo\(\)"):
        refuse_what_is_not_defined(without_capabilities(gather_replicas=lambda self: None), config.strategy)


def test_half_a_capability_is_refused() -> None:
    config = session_config(parsed())
    assert config is not None
    with pytest.raises(ConfigError, match=r"\bOwnTrainer\b.*\bleave_out\b.*\biterations_left_out\b"):
        refuse_what_is_not_defined(without_capabilities(leave_out=lambda self, iterations: None), config.strategy)


@pytest.mark.parametrize("recovery", list(RecoveryKind))
def test_the_capacities_of_a_trainer_weigh_its_counts(recovery: RecoveryKind) -> None:
    """Check that the expert with the most tokens comes first if it has capacity for many more."""
    config = session_config(parsed("--moevement-order", "capacity", "--moevement-recovery", str(recovery)))
    assert config is not None
    assert config.strategy.needs_capacity
    table = equal_experts(4)
    roomy = table.names[2]
    strategy = config.strategy.of(StageOperators(table, None, dict.fromkeys(table.names, 1.0) | {roomy: 100.0}))
    windows = strategy.windows if isinstance(strategy, Redo) else strategy
    assert isinstance(windows, MoEvement)
    assert isinstance(strategy, CountsTokens)
    strategy.observe(np.array([5.0, 4.0, 50.0, 3.0]))
    assert table.names[windows.popularity.order()[0]] == roomy
    with pytest.raises(PopularityError, match=rf"\bcapacity\b.*{re.escape(table.names[0])}\b"):
        config.strategy.of(StageOperators(table, None, dict.fromkeys(table.names[1:], 1.0)))


@pytest.mark.parametrize("words", [[], ["--moevement-strategy", "gemini", "--moevement-order", "capacity"]])
def test_only_windows_that_are_ordered_by_capacity_need_one(words: list[str]) -> None:
    config = session_config(parsed(*words))
    assert config is not None
    assert not config.strategy.needs_capacity


def test_copies_are_where_the_strategy_has_them() -> None:
    def copies(*words: str) -> CopiesConfig:
        config = session_config(parsed(*words))
        assert config is not None
        return config.copies

    assert (copies().placement, copies().replicas) == ("spread", None)
    assert copies("--moevement-strategy", "gemini").placement == "groups"
    assert copies("--moevement-strategy", "gemini", "--moevement-placement", "spread").placement == "spread"
    assert copies("--moevement-strategy", "checkfreq", "--moevement-persist-dir", "d").replicas == 0


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (
            ["--moevement-keep-own", "never", "--moevement-persist-dir", "d"],
            r"--moevement-keep-own never\b.*--moevement-persist-dir d\b",
        ),
        (
            ["--moevement-keep-own", "never", "--moevement-protection", "parity:4+1"],
            r"--moevement-keep-own never\b.*--moevement-protection parity:4\+1",
        ),
        (
            ["--moevement-keep-own", "never", "--moevement-replicas", "0"],
            r"--moevement-keep-own never\b.*--moevement-replicas 0\b",
        ),
        (
            ["--moevement-keep-own", "never", "--moevement-replicas", "1"],
            r"--moevement-keep-own never\b.*--moevement-replicas 1\b",
        ),
        (
            ["--moevement-replicas", "2", "--moevement-protection", "parity:4+1"],
            r"--moevement-replicas 2\b.*--moevement-protection parity:4\+1",
        ),
        (
            ["--moevement-replicas", "2", "--moevement-protection", "copies:1"],
            r"--moevement-replicas 2\b.*--moevement-protection copies:1\b",
        ),
        (
            ["--moevement-protection", "parity:1+1"],
            r"--moevement-protection parity:1\+1.*\bcopies:R\b.*\bparity:G\+M\b",
        ),
        (["--moevement-rollback-on-spike", "2"], r"--moevement-rollback-on-spike 2\b.*--moevement-persist-dir\b"),
        (["--moevement-rollback-by", "2"], r"--moevement-rollback-by 2\b.*--moevement-rollback-on-spike\b"),
        (["--moevement-protection", "raid"], r"--moevement-protection raid\b.*\bcopies:R\b.*\bparity:G\+M\b"),
    ],
)
def test_protections_that_contradict_each_other_are_refused(words: list[str], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        session_config(parsed(*words))


def test_protection_says_what_replicas_say() -> None:
    config = session_config(parsed("--moevement-protection", "copies:3"))
    assert config is not None
    assert config.copies.replicas == 3


def test_no_strategy_saves_nothing_and_has_no_drills() -> None:
    assert session_config(parsed("--moevement-strategy", "none")) is None
    (complaint,) = sparse_checkpoints(parsed("--moevement-strategy", "none", "--moevement-load", "d"))
    assert re.search(r"--moevement-load\b.*--moevement-strategy none\b", complaint)


def test_drills_are_for_ranks_that_there_are() -> None:
    assert list(sparse_checkpoints(parsed("--moevement-inject", "rank=3,phase=step"))) == []
    (complaint,) = sparse_checkpoints(parsed("--moevement-inject", "rank=4,phase=step"))
    assert re.search(r"--moevement-inject rank=4,phase=step\b.*\b0\b.*\b3\b", complaint)


def test_what_cannot_be_interrupted_is_refused_with_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(spares(parsed(inprocess_restart=True))) == []
    monkeypatch.setenv("MOEVEMENT_MEMBER", "0")
    assert list(spares(parsed(log_num_zeros_in_grad=True))) == []
    (complaint,) = spares(parsed(inprocess_restart=True))
    assert re.search(r"--inprocess-restart\b.*--spares\b", complaint)


@pytest.mark.parametrize(
    ("megatrons", "flag", "instead"),
    [
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex", "alltoall"),
        ({"nccl_ub": True}, "--use-nccl-ub", "leave"),
        ({"tp_comm_overlap": True}, "--tp-comm-overlap", "leave"),
    ],
)
def test_what_no_abort_ends_on_gpus_is_refused_with_spares(
    monkeypatch: pytest.MonkeyPatch, megatrons: dict[str, Any], flag: str, instead: str
) -> None:
    monkeypatch.setattr("megatron.moevement.platform.is_cpu", lambda: False)
    assert list(spares(parsed(**megatrons))) == []
    monkeypatch.setenv("MOEVEMENT_MEMBER", "0")
    assert list(spares(parsed())) == []
    (complaint,) = spares(parsed(**megatrons))
    assert re.search(rf"{flag}\b.*--spares\b.*\b{instead}\b", complaint)


def test_the_defaults_of_a_configuration_are_those_of_the_flags() -> None:
    parser = argparse.ArgumentParser()
    add_session_flags(parser)
    assert SessionConfig() == SessionConfig.from_args(parser.parse_args([]), has_experts=True)
    with pytest.raises(ConfigError, match=r"--moevement-load-iteration 5\b"):
        SessionConfig(disk=DiskConfig(load_iteration=5))
