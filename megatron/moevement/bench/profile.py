"""Training run for ``moevement profile``. It measures the parts from which the simulator composes an iteration.

Two kinds of iterations alternate. An iteration without Megatron's timers measures the time of a whole iteration. An
iteration with timers measures its parts; these timers (log level 2) wait for the device when they start and stop, so
such an iteration is slower. After the last iteration, all ranks measure copies, storage and collectives at the same
time. The command line names the training script to measure, which needs no flag of this project.
"""

from __future__ import annotations

import inspect
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.moevement.bench.observed import OUTPUT_ENV
from megatron.moevement.patches import around
from moevement_core.comms.exchange import all_gather_objects

ITERATIONS_ENV, STORAGE_ENV = "MOEVEMENT_BENCH_ITERATIONS", "MOEVEMENT_BENCH_STORAGE"
WARM_UP = 3
PARTS = {
    "forward": ("forward-compute",),
    "backward": ("backward-compute",),
    "reduce": ("all-grads-sync", "embedding-grads-all-reduce", "non-tensor-parallel-grads-all-reduce"),
    "gather": ("params-all-gather",),
    "optimizer": ("optimizer",),
}
"""Names of Megatron's timers for each part of an iteration. ``optimizer`` includes the time of ``gather``."""
SIZES = tuple(4**power for power in range(5, 12))
"""Sizes of a rank's message in bytes: 1 KB to 4 MB."""
REPEATS = 7
COPIED_BYTES, STORED_BYTES = 64 << 20, 32 << 20


class RankTimes:
    """Measurements of one rank."""

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self.whole_s: list[float] = []
        self.parts_s: dict[str, list[float]] = {part: [] for part in PARTS}
        self.layers: dict[str, Any] = {}
        self.count = 0

    def measure(self, train_step: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Measure a call of ``train_step`` of Megatron's trainer, and return its result."""
        bound = inspect.signature(train_step).bind(*arguments, **named).arguments
        config, model = bound["config"], bound["model"]
        is_timed = self.count % 2 == 1
        timers = config.timers
        config.timers = timers if is_timed else None
        _clear(timers)
        _settle()
        began = time.perf_counter()
        try:
            with _layers(model, self.layers) if self.count == WARM_UP - 1 else nullcontext():
                result = train_step(*arguments, **named)
        finally:
            config.timers = timers
        _settle()
        if self.count >= WARM_UP:
            if is_timed:
                for part, names in PARTS.items():
                    self.parts_s[part].append(sum(_elapsed(timers, name) for name in names))
            else:
                self.whole_s.append(time.perf_counter() - began)
        self.count += 1
        if self.count == self.iterations:
            self._tell(model)
        return result

    def _tell(self, model: Any) -> None:
        """Gather the measurements of all ranks; rank 0 writes them to ``samples.json``. Collective."""
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.training import get_args

        args = get_args()
        measured = {
            "stage": parallel_state.get_pipeline_model_parallel_rank(),
            "whole_s": self.whole_s,
            "parts_s": self.parts_s,
            "layers": self.layers,
            "parameters": sum(parameter.numel() for chunk in model for parameter in chunk.parameters()),
            "d2h_bytes_per_s": _copy_rate(),
            "storage_bytes_per_s": _storage_rate(Path(os.environ[STORAGE_ENV])),
        }
        ranks = all_gather_objects(measured, dict[str, Any])
        collectives = list(_collectives())
        if dist.get_rank() == 0:
            written = {
                "ranks": ranks,
                "collectives": collectives,
                "backend": dist.get_backend(),
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                "cores": 0 if torch.cuda.is_available() else len(os.sched_getaffinity(0)),
                "pipeline": args.pipeline_model_parallel_size,
                "chunks": args.virtual_pipeline_model_parallel_size or 1,
                "micro_batches": get_num_microbatches(),
                "tokens": args.micro_batch_size * args.seq_length // args.context_parallel_size,
                "boundary_bytes": _boundary_bytes(args),
            }
            Path(os.environ[OUTPUT_ENV], "samples.json").write_text(json.dumps(written), encoding="utf-8")


def _boundary_bytes(args: Any) -> int:
    tokens = args.micro_batch_size * args.seq_length // args.context_parallel_size
    if args.sequence_parallel:
        tokens //= args.tensor_model_parallel_size
    return int(tokens * args.hidden_size * torch.finfo(args.params_dtype).bits // 8)


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _clear(timers: Any) -> None:
    for name in {name for names in PARTS.values() for name in names}:
        _elapsed(timers, name)


def _elapsed(timers: Any, name: str) -> float:
    """Return the seconds that a timer has counted, and reset the timer; 0 if this run has no such timer."""
    return float(timers._timers[name].elapsed(reset=True)) if name in timers._timers else 0.0


@contextmanager
def _layers(model: Any, sizes: dict[str, Any]) -> Iterator[None]:
    """Record what a transformer layer keeps in memory for a micro-batch, in a ``with`` block that trains.

    Args:
        model: this rank's virtual stages.
        sizes: dictionary that receives the number of layers, and two means over layers: the bytes kept for the backward
            pass, and the bytes of the output.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    kept: list[int] = []
    outputs: list[int] = []
    handles, hooks = [], []

    def before(*_: Any) -> None:
        nbytes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                nbytes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        hook = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        hook.__enter__()
        hooks.append((hook, nbytes))

    def after(_: Any, __: Any, output: Any) -> None:
        hook, nbytes = hooks.pop()
        hook.__exit__(None, None, None)
        kept.append(sum(nbytes.values()))
        tensor = output[0] if isinstance(output, tuple) else output
        outputs.append(tensor.numel() * tensor.element_size())

    layers = [module for chunk in model for module in chunk.modules() if isinstance(module, TransformerLayer)]
    for layer in layers:
        handles += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    sizes |= {
        "count": len(layers),
        "activation_bytes": round(statistics.fmean(kept)) if kept else 0,
        "output_bytes": round(statistics.fmean(outputs)) if outputs else 0,
    }


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _rate(nbytes: int, action: Callable[[], None]) -> float:
    """Return the median rate in bytes per second, while all ranks run ``action`` at the same time. Collective."""
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return nbytes / statistics.median(seconds)


def _copy_rate() -> float:
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=_device())
    host = torch.zeros(COPIED_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def copy() -> None:
        host.copy_(source, non_blocking=True)
        _settle()

    return _rate(COPIED_BYTES, copy)


def _storage_rate(folder: Path) -> float:
    """Return the rate of durable writes to storage, in bytes per second. Collective."""
    folder.mkdir(parents=True, exist_ok=True)
    data = os.urandom(STORED_BYTES)

    def write() -> None:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    return _rate(STORED_BYTES, write)


def _collectives() -> Iterator[dict[str, Any]]:
    """Yield the seconds of each collective, by message size and number of ranks. Collective."""
    ranks = dist.get_world_size()
    sizes = sorted({2**power for power in range(1, ranks.bit_length())} | {ranks})
    for count in (size for size in sizes if 1 < size <= ranks):
        # Neighbouring groups communicate at the same time, as they do in training.
        groups = [dist.new_group(list(range(first, first + count))) for first in range(0, ranks - count + 1, count)]
        place = dist.get_rank() // count
        group = groups[place] if place < len(groups) else None
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", *(("send",) if count == 2 else ())):
            samples = []
            for size in SIZES:
                seconds = _once(name, size, group, count)
                slowest = torch.tensor([seconds], dtype=torch.float64, device=_device())
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                samples.append([size, float(slowest)])
            yield {"collective": name, "ranks": count, "samples": samples}
        for old in groups:
            dist.destroy_process_group(old)


def _once(name: str, size: int, group: Any, count: int) -> float:
    if group is None:
        for _ in range(REPEATS):
            dist.barrier()
        return 0.0
    whole = torch.zeros(max(size // 4, count) // count * count, device=_device())
    part = torch.zeros(len(whole) // count, device=_device())
    own = dist.get_rank(group)

    def run() -> None:
        match name:
            case "all_reduce":
                dist.all_reduce(whole, group=group)
            case "all_gather":
                dist.all_gather_into_tensor(whole, part, group=group)
            case "reduce_scatter":
                dist.reduce_scatter_tensor(part, whole, group=group)
            case "all_to_all":
                dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
            case "send" if own == 0:
                dist.send(whole, group=group, group_dst=1)
            case "send":
                dist.recv(whole, group=group, group_src=0)
        _settle()

    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main() -> None:
    """Run the training script on the command line, and measure it."""
    from megatron.training import training

    measured = RankTimes(int(os.environ[ITERATIONS_ENV]))
    training.train_step = around(training.train_step, measured.measure)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
