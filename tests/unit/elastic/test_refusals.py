"""What an elastic job cannot do is said in one line, before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moevement_core.errors import ConfigError
from moevement_core.restart.environment import MEMBER_ENV
from tests.training import flags

ELASTIC = {"moevement_sparse_ckpt": True, "moevement_elastic": True}
SLOTS = ELASTIC | {"moevement_expert_slots": 4}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no checkpoints": ({"moevement_elastic": True}, "--moevement-elastic without --moevement-sparse-ckpt"),
    "slots alone": ({"moevement_expert_slots": 2}, "--moevement-expert-slots without --moevement-elastic"),
    "too few slots": (ELASTIC | {"moevement_expert_slots": 1}, "2 ranks of a stage hold 2 of 4 experts; needs 2"),
    "no experts": (
        SLOTS | {"num_experts": False, "moe_router_topk": False}, "without --num-experts: there are no experts",
    ),
    "placement alone": (ELASTIC | {"moevement_expert_placement": "x"}, "without --moevement-expert-slots"),
    "stale experts": (
        ELASTIC | {"moevement_strategy": "moetion"}, "--moevement-strategy moc or moetion: what experts at older",
    ),
    "expert parallelism": (SLOTS | {"expert_model_parallel_size": 2}, "--expert-model-parallel-size: slots spread"),
    "grouped": (SLOTS | {"moe_grouped_gemm": True}, "--moe-grouped-gemm: the weights"),
    "dispatcher": (
        SLOTS | {"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type other than alltoall",
    ),
    "dense checkpoints": (
        SLOTS | {"use_distributed_optimizer": True, "save": "/tmp/x", "save_interval": 5},
        "without --dist-ckpt-optim-fully-reshardable: Megatron's default format",
    ),
    "join wait": (ELASTIC | {"moevement_join_wait": -1}, "--moevement-join-wait -1; needs seconds, 0 or more"),
    "floor": (SLOTS | {"moevement_min_replicas": 0}, "--moevement-min-replicas 0"),
}  # fmt: skip


@pytest.fixture
def complaint(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What is said of the tiny model's flags with changes, on two ranks under ``moevement launch``."""
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
    changes, message = REFUSED[name]
    found = complaint(**changes)
    assert message in found
    assert "\n" not in found


def test_nobody_would_form_the_job_again(complaint: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEMBER_ENV, raising=False)
    assert "--moevement-elastic without `moevement launch`" in complaint(**ELASTIC)
