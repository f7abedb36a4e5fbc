"""Checks and timings of every kernel on the GPU of this machine. The command writes benchmarks/kernels.md.

python -m benchmarks.kernels
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from moevement_kernels import launch
from moevement_kernels.backend import Backend, select
from moevement_kernels.cuda.grouped_product import CudaKernelError, library
from moevement_kernels.op import saved_bytes
from moevement_kernels.weights import Weights

from benchmarks.environment import measured_on
from benchmarks.kernels import checks
from benchmarks.kernels.layers import MODELS, Layer, counts_of, layer_of

OUTPUT = Path(__file__).parents[1] / "kernels.md"
ROUNDS, WARM_UP = 20, 3
FLUSH_BYTES = 256 << 20
"""Bytes written between two runs to flush caches, so that weights and tokens come from memory as in training."""


@dataclass
class Row:
    """Times of a layer with one routing: median milliseconds of each pass. None: the pass did not run."""

    layer: Layer
    routing: str
    full: float
    frozen: float
    frozen_cuda: float | None
    floor_full: float | None
    floor_frozen: float | None

    def rate(self, milliseconds: float) -> float:
        """Return the rate of a frozen pass in TFLOP/s."""
        return self.layer.product_flop / milliseconds / 1e9


def main() -> int:
    """Check and time the kernels, write the page, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of all passes (default: {ROUNDS})")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.kernels: this machine has no GPU; run it on a machine with a GPU", file=sys.stderr)
        return 2
    failed = []
    for name, is_right in checks.run(_backends()):
        print(f"{'right' if is_right else 'WRONG'}  {name}", flush=True)
        failed += [] if is_right else [name]
    peak = _peak()
    print(f"BF16 products of 8192 x 8192 in cuBLAS: {peak:.0f} TFLOP/s", flush=True)
    rows = []
    for model in MODELS:
        for is_skewed in (False, True):
            rows.append(measure(layer_of(model), is_skewed, arguments.rounds))
            print(_line(rows[-1], peak), flush=True)
    arguments.output.write_text(
        report(rows, peak, failed=failed, bandwidths=_bandwidths(), device=torch.cuda.get_device_name()),
        encoding="utf-8",
    )
    return 1 if failed else 0


def _backends() -> list[Backend]:
    if torch.cuda.get_device_capability()[0] != 9:
        return [Backend.TRITON]
    try:
        library()
    except CudaKernelError as error:
        print(f"without the CUDA kernel: {error}", flush=True)
        return [Backend.TRITON]
    return [Backend.TRITON, Backend.CUDA]


def measure(layer: Layer, is_skewed: bool, rounds: int) -> Row:
    """Time all passes in turns, so that clock changes and other work affect all passes alike."""
    counts, kind = counts_of(layer, is_skewed), layer.kind
    rows = layer.inner * (2 if kind.is_gated else 1)

    def weights(*shape: int) -> list[torch.Tensor]:
        return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 32 for _ in counts]

    w1, w2 = Weights(weights(rows, layer.hidden)), Weights(weights(layer.hidden, layer.inner))
    x, dy = (torch.randn(layer.tokens, layer.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    p = torch.rand(layer.tokens, device="cuda")
    h = launch.forward(x, p, counts, w1, w2, kind).h
    into = tuple([torch.zeros_like(tensor, dtype=torch.float32) for tensor in weight.data] for weight in (w1, w2))

    def frozen() -> torch.Tensor:
        return launch.input_gradient(dy, h, p, counts, w1, w2, kind).dh

    def full() -> None:
        gradients = launch.input_gradient(dy, h, p, counts, w1, w2, kind, [True] * len(counts))
        launch.weight_gradient(dy, gradients.dh, x, gradients.a, counts, (into[0], into[1]), True)

    def frozen_cuda() -> None:
        select(Backend.CUDA)
        frozen()
        select(Backend.TRITON)

    passes: dict[str, Callable[[], object]] = {"full": full, "frozen": frozen}
    if Backend.CUDA in _backends():
        passes["frozen_cuda"] = frozen_cuda
    passes |= _floor(x, dy, h=h, counts=counts, w1=w1, w2=w2)
    times = _times(passes, rounds)
    return Row(
        layer, routing="skewed" if is_skewed else "even", full=times["full"], frozen=times["frozen"], frozen_cuda=times.get("frozen_cuda"),
        floor_full=times.get("floor_full"), floor_frozen=times.get("floor_frozen"),
    )  # fmt: skip


def _floor(
    x: torch.Tensor, dy: torch.Tensor, h: torch.Tensor, counts: list[int], w1: Weights, w2: Weights
) -> dict[str, Callable[[], object]]:
    """Return passes that compute the products alone, with torch's grouped GEMM and weights in one block of memory.

    The passes leave out activations and probabilities, so their time is a lower bound.
    """
    if not hasattr(torch, "_grouped_mm"):
        return {}
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    first, second = torch.stack(list(w1.data)), torch.stack(list(w2.data))
    a = torch.empty(x.shape[0], w2.columns, device="cuda", dtype=x.dtype)

    def frozen() -> None:
        torch._grouped_mm(dy, second, offs=ends)
        torch._grouped_mm(h, first, offs=ends)

    def full() -> None:
        frozen()
        torch._grouped_mm(dy.t(), a, offs=ends)
        torch._grouped_mm(h.t(), x, offs=ends)

    try:
        full()
    except RuntimeError as error:
        print(f"torch's grouped GEMM cannot give the lower bound: {str(error).splitlines()[0]}", flush=True)
        return {}
    return {"floor_full": full, "floor_frozen": frozen}


def _times(passes: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each pass."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(rounds + WARM_UP):
        for name, run in passes.items():
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            if number >= WARM_UP:
                samples[name].append(begin.elapsed_time(end))
    return {name: statistics.median(milliseconds) for name, milliseconds in samples.items()}


def _peak() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / _times({"peak": lambda: a @ b}, ROUNDS)["peak"] / 1e9


def _bandwidths() -> dict[str, float]:
    """Return rates in GB/s. Bytes of a copy on the device count twice, as read and as written; to the host, once."""
    source = torch.randn(256 << 20, device="cuda")
    target, host = torch.empty_like(source), torch.empty(source.numel(), pin_memory=True)
    times = _times(
        {
            "copy on the device": lambda: target.copy_(source),
            "copy to the host": lambda: host.copy_(source, non_blocking=True),
        },
        ROUNDS,
    )
    moved = {"copy on the device": 2 * source.nbytes, "copy to the host": source.nbytes}
    return {name: moved[name] / milliseconds / 1e6 for name, milliseconds in times.items()}


def _line(row: Row, peak: float) -> str:
    def cell(milliseconds: float | None) -> str:
        return "" if milliseconds is None else f"{milliseconds:.3f}"

    best = min(row.frozen, row.frozen_cuda or row.frozen)
    cells = [
        f"{row.layer.model}, {row.layer.experts} experts, {row.layer.tokens} tokens", row.routing, cell(row.full),
        cell(row.frozen), cell(row.frozen_cuda), cell(row.floor_full), cell(row.floor_frozen),
        f"{row.full / best:.2f}", f"{row.rate(best):.0f}", f"{row.rate(best) / peak:.0%}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def report(rows: list[Row], peak: float, failed: list[str], bandwidths: dict[str, float], device: str) -> str:
    """Return the text of the page."""
    lines = "\n".join(_line(row, peak) for row in rows)
    memory = "\n".join(
        f"| {layer.model} | {_saved(layer, layer.tokens):.0f} MB | {_saved(layer, 0):.0f} MB |"
        for layer in dict.fromkeys(row.layer for row in rows)
    )
    speeds = "\n".join(f"| {name} | {value:.0f} |" for name, value in bandwidths.items())
    wrong = f"\n**Wrong: {'; '.join(failed)}.** Times of what is wrong mean nothing.\n" if failed else ""
    return f"""# Kernels of the expert layers

    python -m benchmarks.kernels        (writes this file)
{wrong}
One expert layer of each model of table 2 on one rank, one micro-batch, BF16. Milliseconds, medians of passes that take
turns, with cold caches. The floor is the time of the products alone, by torch's grouped GEMM on weights in one block of memory. It
has no activation and no probabilities, and weight gradients are not added to anything. Speed-up, TFLOP/s and the share are of the faster of
the two frozen passes; the share is of {peak:.0f} TFLOP/s, which cuBLAS reaches on products of 8192 x 8192 here.

| layer | routing | full | frozen, Triton | frozen, CUDA | floor, full | floor, frozen | speed-up | TFLOP/s | share |
|---|---|---|---|---|---|---|---|---|---|
{lines}

Activations kept for the backward pass, beside the probabilities:

| layer | all active | all frozen |
|---|---|---|
{memory}

| | GB/s |
|---|---|
{speeds}

{device}; {measured_on("torch", "triton")}.
"""


def _saved(layer: Layer, active: int) -> float:
    return saved_bytes(layer.tokens, active, layer.hidden, layer.inner, layer.kind, 2) / 1e6


if __name__ == "__main__":
    sys.exit(main())
