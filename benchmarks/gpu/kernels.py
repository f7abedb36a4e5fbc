"""Checks of the kernels of expert layers: results on odd shapes, bits of mixed experts, rates, host time."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from moevement_kernels import launch, reference
from moevement_kernels.activations import Activation
from moevement_kernels.backend import Backend, select
from moevement_kernels.op import grouped_mlp
from moevement_kernels.tiles import Tiles
from moevement_kernels.weights import Weights

from benchmarks.gpu.check import Report
from benchmarks.gpu.processes import ROOT, ProcessFailed, call

ODD_COUNTS = [0, 1, 127, 129]
INTERPRETED = {"TRITON_INTERPRET": "1"}
TINY = Tiles(rows=16, columns=16, inner=16, warps=4, stages=2)
"""Small tiles for Triton's interpreter, which is slow."""
SANITIZER_S = 40
MASKS = 50


def right(report: Report) -> None:
    """Compare every kernel with its reference, and run odd shapes under compute-sanitizer if it is installed."""
    if not torch.cuda.is_available():
        for name, is_near in call(odd_shapes, 120, INTERPRETED, backend=Backend.TRITON).items():
            report.claim(f"interpreted, {name}", is_near)
        return
    from benchmarks.kernels import checks
    from benchmarks.kernels.__main__ import _backends

    for backend in _backends():
        try:
            for name, is_near in call(odd_shapes, 40, backend=backend).items():
                report.claim(f"{backend}, {name}", is_near)
        except (ProcessFailed, TimeoutError) as error:
            report.claim(f"{backend}, odd shapes: {str(error).splitlines()[-1]}", False)
    _sanitized(report)
    for name, is_right in checks.run(_backends()):
        report.claim(name, is_right)


def _problem(counts: list[int], hidden: int, inner: int, kind: Activation, device: torch.device) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(device, dtype)

    tokens, rows = sum(counts), inner * (2 if kind.is_gated else 1)
    w1 = [normal(rows, hidden) / 8 for _ in counts]
    w2 = [normal(hidden, inner) / 8 for _ in counts]
    return normal(tokens, hidden), normal(tokens, hidden), torch.rand(tokens, generator=draw).to(device), w1, w2


def odd_shapes(backend: str) -> dict[str, bool]:
    """Return True for each output if the kernel agrees with its reference on empty, tiny and uneven experts."""
    select(Backend(backend))
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if is_gpu else "cpu")
    counts, hidden, inner = (ODD_COUNTS, 328, 456) if is_gpu else ([0, 1, 15, 17], 24, 20)
    tiles = None if is_gpu else TINY
    agree, active = {}, [True] * len(counts)
    for kind in (Activation.SWIGLU, Activation.GELU):
        x, dy, p, w1, w2 = _problem(counts, hidden, inner=inner, kind=kind, device=device)
        weights = Weights(w1), Weights(w2)
        wanted = reference.forward(x, p, counts, *weights, kind)
        outputs = launch.forward(x, p, counts, *weights, kind, tiles)
        agree[f"{kind}: outputs"] = all(_near(*pair) for pair in zip(outputs, wanted, strict=True))
        back = reference.input_gradient(dy, wanted.h, p, counts, *weights, kind, active)
        backward = launch.input_gradient(dy, wanted.h, p, counts, *weights, kind, active, tiles)
        agree[f"{kind}: input gradients"] = all(_near(*pair) for pair in zip(backward, back, strict=True))
        into = tuple([torch.zeros_like(tensor, dtype=torch.float32) for tensor in weight] for weight in (w1, w2))
        launch.weight_gradient(dy, back.dh, x, back.a, counts, (into[0], into[1]), True, tiles)
        gradients = reference.weight_gradient(dy, back.dh, x, back.a, counts, active)
        pairs = [(a, b) for sums, other in zip(into, gradients, strict=True) for a, b in zip(sums, other, strict=True)]
        agree[f"{kind}: weight gradients"] = all(b is not None and _near(a, b, 2**-6) for a, b in pairs)
    if is_gpu:
        torch.cuda.synchronize()
    return agree


def _near(actual: torch.Tensor, wanted: torch.Tensor, error: float | None = None) -> bool:
    error = error or (2**-6 if actual.dtype == torch.bfloat16 else 1e-4)
    largest = float(wanted.float().abs().max()) if wanted.numel() else 0.0
    return not wanted.numel() or bool((actual.float() - wanted.float()).abs().max() <= error * max(largest, 1e-30))


def _sanitized(report: Report) -> None:
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        report.figure("compute-sanitizer", "not run: not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [
            tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "benchmarks.gpu.child",
            f"{odd_shapes.__module__}:{odd_shapes.__qualname__}", json.dumps({"backend": Backend.TRITON}),
            str(Path(folder, "result")),
        ]  # fmt: skip
        try:
            ended = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=SANITIZER_S, check=False,
                env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            report.figure("compute-sanitizer memcheck", f"not over in {SANITIZER_S} s")
            return
    print(ended.stdout[-3000:], ended.stderr[-1000:])
    report.figure("compute-sanitizer memcheck", f"exit code {ended.returncode}")
    report.claim("compute-sanitizer finds no bad access", ended.returncode == 0)


def mixed(report: Report) -> None:
    """Freeze experts by random masks, and compare the other gradients with those of a fully active layer."""
    backends = [Backend.TRITON]
    if torch.cuda.is_available():
        from benchmarks.kernels.__main__ import _backends

        backends = _backends()
    environment = {} if torch.cuda.is_available() else INTERPRETED
    for backend in backends:
        masks = MASKS if torch.cuda.is_available() else 2
        differing = call(differing_masks, 120, environment, backend=backend, masks=masks)
        report.figure(f"{backend}: masks that differ", f"{differing} of {masks}")
        report.claim(f"{backend}: mixed experts have equal bits", differing == 0)


def differing_masks(backend: str, masks: int) -> int:
    """Return the number of random masks whose gradients differ from those of all-active experts."""
    select(Backend(backend))
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if is_gpu else "cpu")
    counts, hidden, inner = ([130, 0, 1, 517, 64, 300], 328, 456) if is_gpu else ([3, 0, 1, 5], 16, 16)
    x, dy, p, w1, w2 = _problem(counts, hidden, inner=inner, kind=Activation.SWIGLU, device=device)

    def gradients(active: list[bool]) -> dict[str, torch.Tensor]:
        leaf, prob = x.clone().requires_grad_(), p.clone().requires_grad_()
        parts = [
            [w.clone().requires_grad_(is_active) for w, is_active in zip(weights, active, strict=True)]
            for weights in (w1, w2)
        ]
        y = grouped_mlp(leaf, prob, counts, parts[0], parts[1], Activation.SWIGLU)
        y.backward(dy)
        named = {f"{part}.{number}": w.grad for part in (0, 1) for number, w in enumerate(parts[part])}
        every = {"y": y.detach(), "x": leaf.grad, "p": prob.grad, **named}
        return {name: gradient for name, gradient in every.items() if gradient is not None}

    wanted = gradients([True] * len(counts))
    draw = random.Random(5)
    differing = 0
    for _ in range(masks):
        masked = gradients([draw.random() < 0.5 for _ in counts])
        differing += not all(torch.equal(gradient, wanted[name]) for name, gradient in masked.items())
    return differing


def rates(report: Report) -> None:
    """Time a layer with several tiles and backends, and with cuBLAS and Transformer Engine's GroupedLinear."""
    from benchmarks.kernels import __main__ as timing
    from benchmarks.kernels.layers import counts_of, layer_of

    layer = layer_of("deepseek_moe")
    row = timing.measure(layer, False, 5)
    peak = timing._peak()
    report.figure("cuBLAS, 8192 x 8192", peak, "TFLOP/s")
    for name, milliseconds in (
        ("full backward", row.full), ("frozen backward, Triton", row.frozen), ("frozen backward, CUDA", row.frozen_cuda),
        ("floor of the full one", row.floor_full), ("floor of the frozen one", row.floor_frozen),
    ):  # fmt: skip
        if milliseconds is not None:
            report.figure(name, milliseconds, "ms")
    report.figure("frozen backward, Triton", row.rate(row.frozen), "TFLOP/s")
    counts = counts_of(layer, False)
    x, dy, p, w1, w2 = _problem(
        counts, hidden=layer.hidden, inner=layer.inner, kind=layer.kind, device=torch.device("cuda")
    )
    weights = Weights(w1), Weights(w2)
    h = launch.forward(x, p, counts, *weights, layer.kind).h
    passes: dict[str, Callable[[], object]] = {
        f"input gradient, {columns} columns": functools.partial(
            launch.input_gradient, dy, h, p, counts, *weights, layer.kind, tiles=Tiles(columns=columns)
        )
        for columns in (128, 64)
    }
    passes["forward"] = functools.partial(launch.forward, x, p, counts, *weights, layer.kind)
    parts = dy.split(counts)
    passes["cuBLAS by expert, dy W2"] = lambda: [part @ w for part, w in zip(parts, w2, strict=True)]
    with contextlib.suppress(ModuleNotFoundError):
        passes |= _transformer_engine(x, counts, layer.hidden, w1[0].shape[0])
    for name, milliseconds in timing._times(passes, 5).items():
        report.figure(name, milliseconds, "ms")


def _transformer_engine(x: torch.Tensor, counts: list[int], hidden: int, rows: int) -> dict[str, Callable[[], object]]:
    from transformer_engine.pytorch import GroupedLinear

    layer = GroupedLinear(len(counts), hidden, rows, bias=False, params_dtype=x.dtype, device="cuda")
    return {"GroupedLinear of Transformer Engine, up": lambda: layer(x, counts)}


def host_time(report: Report) -> None:
    """Measure host time of calls with few tokens, and count copies to the device and newly compiled variants."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden, inner = (1024, 512) if device.type == "cuda" else (32, 16)
    for experts in (8, 64):
        run = _few_tokens(experts, tokens=64, hidden=hidden, inner=inner, device=device)
        run()
        forward, backward = zip(*(run() for _ in range(10)), strict=True)
        report.figure(f"{experts} experts: forward", 1e6 * statistics.median(forward), "us")
        report.figure(f"{experts} experts: backward", 1e6 * statistics.median(backward), "us")
        if device.type == "cuda":
            report.figure(f"{experts} experts: copies to the device in a call", _copies_in(run))
    if device.type == "cuda":
        compiled = _compiled_over(hidden, inner, device)
        report.figure("variants compiled for 50 further token counts", compiled)
        report.claim("new token counts compile nothing", compiled == 0)


def _few_tokens(
    experts: int, tokens: int, hidden: int, inner: int, device: torch.device
) -> Callable[[], tuple[float, float]]:
    counts = [tokens // experts + (number < tokens % experts) for number in range(experts)]
    x, dy, p, w1, w2 = _problem(counts, hidden, inner=inner, kind=Activation.SWIGLU, device=device)
    for weight in (*w1, *w2):
        weight.requires_grad_()

    def run() -> tuple[float, float]:
        leaf = x.detach().requires_grad_()
        began = time.perf_counter()
        y = grouped_mlp(leaf, p, counts, w1, w2, Activation.SWIGLU)
        between = time.perf_counter()
        y.backward(dy)
        ended = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return between - began, ended - between

    return run


def _copies_in(run: Callable[[], object]) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
    return sum(event.count for event in profiled.key_averages() if "HtoD" in event.key)


def _compiled_over(hidden: int, inner: int, device: torch.device) -> int:
    from triton import knobs

    compiled: list[str] = []

    def note(*, fn: Any, **_: Any) -> None:
        compiled.append(str(fn))

    _few_tokens(experts=8, tokens=96, hidden=hidden, inner=inner, device=device)()
    knobs.runtime.jit_post_compile_hook = note
    try:
        for tokens in range(97, 147):
            _few_tokens(experts=8, tokens=tokens, hidden=hidden, inner=inner, device=device)()
    finally:
        knobs.runtime.jit_post_compile_hook = None
    return len(compiled)
