"""A restart clears state outside of models that an interruption left half done."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.moevement.restart import leftovers, megatron_state
from megatron.moevement.runtime.live import Live


def test_indices_that_were_mapped_in_part_are_mapped_again() -> None:
    half = SimpleNamespace(shuffle_index="mapped", sample_index="mapped", document_index=None)
    whole = SimpleNamespace(shuffle_index="mapped", sample_index="mapped", document_index="mapped")
    late = SimpleNamespace(shuffle_index=None, sample_index=None, document_index=None)
    blend = SimpleNamespace(dataset_index="mapped", dataset_sample_index=None, datasets=[half, whole])
    leftovers.clear(Live(datasets=[(blend, [late], None)]), {})
    assert half.shuffle_index is None
    assert blend.dataset_index is None
    assert whole.shuffle_index == "mapped"
    assert late.shuffle_index is None


def test_modules_in_fp8_register_again() -> None:
    chunk: Any = torch.nn.Sequential(torch.nn.Linear(1, 1))
    meta = {"buffer_index_and_autocast_key": [0, "key"], "num_gemms": 1}
    chunk[0].fp8_meta = meta
    leftovers._reset_modules(Live(model=[chunk]))
    assert meta == {"num_gemms": 1}


def test_buffers_of_deepep_are_made_for_the_processes_of_one_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("fused_a2a")
    module._buffer, reset = object(), []
    module.reset_hybrid_ep_buffer = lambda: reset.append(True)
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.moe.fused_a2a", module)
    megatron_state._forget_dispatch_buffers()
    assert module._buffer is None
    assert reset == [True]


def test_one_process_writes_what_megatron_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check that only the last rank has writers, although an elastic job changes which process that is."""
    from megatron.training import global_vars

    args = Namespace(rank=0, world_size=2, tensorboard_dir=str(tmp_path), tensorboard_queue_size=1)
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", None)
    monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", object())
    monkeypatch.setattr(global_vars, "_set_wandb_writer", lambda args: None)
    megatron_state.take_rank(args, 1, 2)
    assert global_vars.get_tensorboard_writer() is not None
    megatron_state.take_rank(args, 0, 2)
    assert global_vars.get_tensorboard_writer() is None
    assert global_vars._GLOBAL_WANDB_WRITER is None
