"""Megatron runs without CUDA, and the functions that replace those of CUDA give right results."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.moevement import patches, platform
from moevement_core.errors import ConfigError
from tests.harness import run_ranks
from tests.training import ROOT


def test_every_replaced_name_has_a_reason() -> None:
    entries = patches.replaced()
    assert len(entries) > 60
    assert all(entry.reason for entry in entries)


def test_cuda_stays_unavailable_and_its_tensor_types_stay_alone() -> None:
    assert not torch.cuda.is_available()
    cuda_type: Any = torch.cuda.FloatTensor  # type: ignore[attr-defined]
    assert cuda_type.__module__ == "torch.cuda"
    assert not isinstance(torch.zeros(1), cuda_type)


@pytest.mark.parametrize("name", ["zeros", "ones", "empty", "rand", "randn", "arange"])
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 1)])
def test_factories_send_cuda_to_the_cpu(name: str, device: Any) -> None:
    assert getattr(torch, name)(3, device=device).device.type == "cpu"
    assert getattr(torch, name)(3, device="meta").device.type == "meta"


def test_other_ways_to_a_device() -> None:
    tensor = torch.zeros(2)
    assert torch.tensor([1], device="cuda").device.type == "cpu"
    assert torch.empty_like(tensor, device="cuda").device.type == "cpu"
    assert tensor.new_zeros(2, device="cuda").device.type == "cpu"
    assert tensor.cuda() is tensor
    assert tensor.to("cuda").data_ptr() == tensor.data_ptr()
    assert tensor.to(device="cuda", dtype=torch.float64).dtype == torch.float64
    assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
    tensor.record_stream(torch.cuda.current_stream())


def test_type_says_what_optimizers_look_for() -> None:
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type("torch.cuda.HalfTensor").dtype == torch.float16
    assert torch.zeros(1).type(torch.int64).dtype == torch.int64


def test_streams_and_events() -> None:
    stream, start, end = torch.cuda.Stream(priority=-1), torch.cuda.Event(enable_timing=True), torch.cuda.Event()
    with torch.cuda.stream(stream):
        start.record()
        end.record(stream)
    stream.wait_event(end)
    torch.cuda.current_stream().wait_stream(stream)
    end.synchronize()
    assert end.query()
    assert 0 <= start.elapsed_time(end) < 1000
    with pytest.raises(RuntimeError, match=r"\brecord\(\)"):
        start.elapsed_time(torch.cuda.Event())


def test_memory_figures_are_those_of_this_process() -> None:
    before = torch.cuda.max_memory_allocated()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    assert torch.cuda.memory_allocated() > 64 << 20
    assert torch.cuda.max_memory_allocated() >= before
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] > 0
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total == torch.cuda.get_device_properties(0).total_memory
    del block


def test_the_random_tracker_forks_and_comes_back() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with tracker.fork("a"):
        first = torch.rand(4)
    with tracker.fork("b"):
        other = torch.rand(4)
    with tracker.fork("a"):
        second = torch.rand(4)
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(first, other)
    assert not torch.equal(first, second)
    again = CudaRNGStatesTracker()
    again.add("a", 1)
    with again.fork("a"):
        assert torch.equal(torch.rand(4), first)


def test_recompute_draws_the_same_dropout() -> None:
    from megatron.core import tensor_parallel

    tensor_parallel.random.initialize_rng_tracker()
    torch.manual_seed(5)
    x = torch.ones(256, requires_grad=True)
    out = tensor_parallel.checkpoint(lambda t: torch.nn.functional.dropout(t * 2, 0.5), False, x)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())


def test_split_sizes_for_all_to_all_are_numbers() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    moved = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)
    assert isinstance(moved, np.ndarray)
    tensor = torch.tensor([1])
    assert token_dispatcher.maybe_move_tensor_to_cpu(tensor) is tensor


def test_jit_fuser_is_off_and_torch_compile_is_its_own_again() -> None:
    from megatron.core import jit

    assert jit.jit_fuser(len) is len
    assert torch.compile.__module__ == "torch"


def test_a_checkpoint_writer_gets_copies() -> None:
    """Check that a later update does not change the bytes that a checkpoint writer received."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from megatron.moevement.platform.megatron_cpu import _with_copies

    weight = torch.zeros(3)

    class Writer:
        def __init__(self) -> None:
            self.write_buckets: list[Any] = []

    def prepare(writer: Any) -> None:
        writer.write_buckets = [("path", "key", ([], [("item", weight)]))]

    writer = Writer()
    _with_copies(prepare, writer)
    weight += 1
    ((_, _, (_, ((_, copied),))),) = writer.write_buckets
    assert torch.equal(copied, torch.zeros(3))
    assert FileSystemWriterAsync.prepare_write_data.__wrapped__.__module__ == FileSystemWriterAsync.__module__


@pytest.mark.builds
def test_a_spawned_process_of_a_script_has_the_platform_and_the_scripts_classes(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "class Payload:\n"
        "    value = 42\n"
        "def child(connection, payload):\n"
        "    import torch\n"
        "    connection.send((torch.zeros(1, device='cuda').device.type, torch.cuda.device_count(), payload.value))\n"
        "if __name__ == '__main__':\n"
        "    for method in ('spawn', 'forkserver', 'fork'):\n"
        "        context = multiprocessing.get_context(method)\n"
        "        ours, theirs = context.Pipe()\n"
        "        process = context.Process(target=child, args=(theirs, Payload()))\n"
        "        process.start()\n"
        "        print(method, *ours.recv(), flush=True)\n"
        "        process.join()\n"
        "    sys.exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron.moevement.worker", str(script)],
        capture_output=True, text=True, cwd=ROOT, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["spawn cpu 1 42", "forkserver cpu 1 42", "fork cpu 1 42"]


def test_the_platform_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEVEMENT_PLATFORM", "cuda")
    assert not platform.is_cpu()
    monkeypatch.setenv("MOEVEMENT_PLATFORM", "tpu")
    with pytest.raises(ConfigError, match=r"\bMOEVEMENT_PLATFORM\b.*'tpu'.*'cpu'.*'cuda'"):
        platform.is_cpu()


def _coalesced_and_one_by_one() -> bool:
    from megatron.core.distributed import param_and_grad_buffer
    from torch.distributed import _coalescing_manager

    rank = dist.get_rank()

    def results(manager: Any, is_async: bool) -> list[torch.Tensor]:
        torch.manual_seed(rank)
        inputs: dict[Any, Any] = {
            dist.all_reduce: lambda: [torch.randn(6)],
            dist.all_gather_into_tensor: lambda: [torch.zeros(6), torch.randn(3)],
            dist.reduce_scatter_tensor: lambda: [torch.zeros(3), torch.randn(6)],
        }
        done = []
        for function, tensors in inputs.items():
            both = [tensors(), tensors()]
            with manager(dist.group.WORLD, async_ops=is_async) as works:
                for arguments in both:
                    function(*arguments)
            if is_async:
                works.wait()
            done += [arguments[0] for arguments in both]
        return done

    replacement = param_and_grad_buffer._coalescing_manager
    assert replacement is not _coalescing_manager
    for is_async in (True, False):
        for result, other in zip(results(replacement, is_async), results(_coalescing_manager, is_async), strict=True):
            assert torch.equal(result, other)
    with pytest.raises(KeyError), replacement(dist.group.WORLD):
        raise KeyError  # an interruption leaves nothing behind
    return all(torch.equal(*pair) for pair in zip(results(replacement, True), results(replacement, False), strict=True))


def test_collectives_that_megatron_coalesces_give_the_same_one_by_one() -> None:
    assert [outcome.result for outcome in run_ranks(_coalesced_and_one_by_one, 2)] == [True, True]


def _send_matrices() -> list[float]:
    """Send each rank's own matrices, one on rank 0 and two on rank 1, and return the sums of all three."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    rank = dist.get_rank()
    matrices = [torch.nn.Parameter(torch.full((2, size), float(10 * rank + size))) for size in (3, 4, 5)]
    chain = LayerWiseDistributedOptimizer.__new__(LayerWiseDistributedOptimizer)
    chain.dp_cp, chain.expt_dp, chain.pg_collection = dist.group.WORLD, dist.group.WORLD, object()
    chain.dp_cp_params_list, chain.expt_dp_params_list = [matrices[:1], matrices[1:]], None
    chain.allgather_params()
    return [parameter.sum().item() for parameter in matrices]


def test_ranks_send_matrices_of_different_sizes() -> None:
    expected = [2 * 3 * 3.0, 2 * 4 * 14.0, 2 * 5 * 15.0]
    assert [outcome.result for outcome in run_ranks(_send_matrices, 2)] == [expected, expected]
