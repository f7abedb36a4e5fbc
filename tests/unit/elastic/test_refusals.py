"""Arguments that an elastic job does not support are refused in one line, before anything is built."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from moevement_core.errors import ConfigError
from moevement_core.util.environment import MEMBER_ENV
from tests.training import flags

ELASTIC = {"moevement_sparse_ckpt": True, "moevement_elastic": True}
SLOTS = ELASTIC | {"moevement_expert_slots": 4}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no checkpoints": ({"moevement_elastic": True}, r"--moevement-elastic\b.*--moevement-sparse-ckpt\b"),
    "slots alone": ({"moevement_expert_slots": 2}, r"--moevement-expert-slots\b.*--moevement-elastic\b"),
    "too few slots": (
        ELASTIC | {"moevement_expert_slots": 1}, r"--moevement-expert-slots 1\b.*\b2 ranks\b.*\b4 experts\b.*\b2\b",
    ),
    "no experts": (
        SLOTS | {"num_experts": False, "moe_router_topk": False}, r"--moevement-expert-slots 4\b.*--num-experts\b",
    ),
    "placement alone": (
        ELASTIC | {"moevement_expert_placement": "x"}, r"--moevement-expert-placement\b.*--moevement-expert-slots\b",
    ),
    "stale experts": (
        ELASTIC | {"moevement_strategy": "moetion"}, r"--moevement-elastic\b.*--moevement-strategy\b.*\bmoetion\b",
    ),
    "expert parallelism": (
        SLOTS | {"expert_model_parallel_size": 2}, r"--moevement-expert-slots 4\b.*--expert-model-parallel-size\b",
    ),
    "grouped": (SLOTS | {"moe_grouped_gemm": True}, r"--moevement-expert-slots 4\b.*--moe-grouped-gemm\b"),
    "dispatcher": (
        SLOTS | {"moe_token_dispatcher_type": "allgather"}, r"--moe-token-dispatcher-type\b.*\balltoall\b",
    ),
    "dense checkpoints": (
        SLOTS | {"use_distributed_optimizer": True, "save": "/tmp/x", "save_interval": 5},
        r"--use-distributed-optimizer\b.*--dist-ckpt-optim-fully-reshardable\b",
    ),
    "join wait": (ELASTIC | {"moevement_join_wait": -1}, r"--moevement-join-wait -1\b.*\b0\b"),
    "floor": (SLOTS | {"moevement_min_replicas": 0}, r"--moevement-min-replicas 0\b"),
}  # fmt: skip


@pytest.fixture
def complaint(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that returns the error about changed flags of the tiny model in a job of two ranks."""
    from megatron.moevement.activate import activate

    activate()
    from megatron.training import arguments

    def refuse(**changes: Any) -> str:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setattr("sys.argv", ["script", *flags(**changes)])
        with pytest.raises(ConfigError) as caught:
            arguments.validate_args(arguments.parse_args(), {})
        return str(caught.value)

    return refuse


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, complaint: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMBER_ENV, "0")
    changes, pattern = REFUSED[name]
    message = complaint(**changes)
    assert re.search(pattern, message), message
    assert "\n" not in message


def test_nobody_would_form_the_job_again(complaint: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEMBER_ENV, raising=False)
    assert re.search(r"--moevement-elastic\b.*\bmoevement launch\b", complaint(**ELASTIC))
