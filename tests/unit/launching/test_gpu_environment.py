"""Environment variables that a launcher sets for ranks on GPUs, unless the user has set them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moevement_core.launching.launch import Launch, _environment, gpu_environment
from moevement_core.launching.worker import TORCH, TrainerKind

ABORTS = {
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_RAS_ENABLE": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}  # fmt: skip
COPIES = {"CUDA_DEVICE_MAX_COPY_CONNECTIONS": "8"}
ON_GPUS = replace(TORCH, uses_gpus=lambda: True)
ON_CPUS = replace(TORCH, uses_gpus=lambda: False)


@pytest.fixture(autouse=True)
def none_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ABORTS | COPIES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("trainer", "spares", "expected"),
    [(ON_GPUS, 1, ABORTS | COPIES), (ON_GPUS, 0, ABORTS | COPIES), (ON_GPUS, None, COPIES), (ON_CPUS, 1, {})],
)
def test_what_aborts_need_is_set_where_there_are_aborts(
    trainer: TrainerKind, spares: int | None, expected: dict[str, str]
) -> None:
    launch = Launch(2, ["script.py"], trainer, show_logs=False, fresh_interpreters=False, spares=spares)
    variables = _environment(launch, 1)
    assert {name: value for name, value in variables.items() if name in ABORTS | COPIES} == expected


@pytest.mark.parametrize("name", [*ABORTS, *COPIES])
def test_a_value_of_the_users_own_wins(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "7")
    assert gpu_environment(ON_GPUS, has_spares=True) == ABORTS | COPIES | {name: "7"}
