"""Checks of training on one rank: recovery from wiped device memory, recomputed operators, cost of snapshots."""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.gpu.check import Report
from benchmarks.gpu.launched import LOCAL, events, is_equal, pretrain
from moevement_core.run.run_record import RunRecord

ITERATIONS, WIPED_AT = 16, 11
SNAPSHOTS = ("--moevement-sparse-ckpt", "--moevement-replicas", "0", "--moevement-window")
DETERMINISTIC = {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
STALL_ERROR = 0.02
"""Share of an iteration by which the cost of snapshots may exceed the reported stall."""
TIMES = 20


def recovery(report: Report) -> None:
    """Wipe all state with default kernels, then in deterministic mode, and compare with runs without a failure."""
    modes: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {"default": ((), {})}
    if torch.cuda.is_available():
        modes["deterministic"] = (("--deterministic-mode",), DETERMINISTIC)
    with tempfile.TemporaryDirectory() as folder:
        with ThreadPoolExecutor() as pool:  # Most of a job's time is its start, and no claim here is about time.
            jobs = {
                (mode, name): pool.submit(
                    pretrain, Path(folder, f"{mode}-{name}"), ITERATIONS, *SNAPSHOTS, "4", *words, *more,
                    environment=environment,
                )
                for mode, (words, environment) in modes.items()
                for name, more in (("free", ()), ("wiped", ("--moevement-wipe-at", str(WIPED_AT))))
            }  # fmt: skip
        for mode in modes:
            free, wiped = jobs[mode, "free"].result(), jobs[mode, "wiped"].result()
            recoveries = events(wiped, "recovery")
            report.claim(f"{mode}: the recovery goes on", len(recoveries) == 1)
            equal = is_equal(free, wiped)
            for name in ("largest_difference", "replayed", "recomputed", "fetch_s", "replay_s"):
                report.figure(f"{mode}: {name}", str(recoveries[-1][name]) if recoveries else "no recovery")
            report.figure(f"{mode}: bits of the failure-free run", str(equal))
            if mode == "deterministic" or not torch.cuda.is_available():
                report.claim(f"{mode}: equal bits", equal)
        if importlib.util.find_spec("transformer_engine") is not None:
            layers = [word for word in LOCAL if word not in ("local", "--transformer-impl")]
            record = pretrain(
                Path(folder, "te"), ITERATIONS, *SNAPSHOTS, "4", "--moevement-wipe-at", str(WIPED_AT), layers=layers
            )
            recoveries_te = events(record, "recovery")
            report.figure("Transformer Engine: largest_difference", str(recoveries_te[-1]["largest_difference"]))
        else:
            report.figure("Transformer Engine's layers", "not run: not installed")


def first_difference(report: Report) -> None:
    """Run the operations of an expert layer, forward and backward, many times on the same values."""
    for name, operator in _operators().items():
        first = operator()
        largest, scale = 0.0, float(first.abs().max())
        for _ in range(TIMES):
            largest = max(largest, float((operator() - first).abs().max()) / scale)
        report.figure(f"{name}: largest relative difference of {TIMES} runs", largest)
        report.claim(f"{name} comes to the same bits", largest == 0.0)


def _operators() -> dict[str, Callable[[], torch.Tensor]]:
    """Return a function for each operation of a layer, by name. It runs the operation and returns an FP32 result."""
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens, hidden, experts, most = (4096, 1024, 8, 2) if device.type == "cuda" else (64, 16, 4, 2)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=draw).to(device, torch.bfloat16)
    logits = torch.randn(tokens, experts, generator=draw).to(device)
    probs, chosen = logits.softmax(-1).topk(most, -1)
    routing = torch.zeros_like(logits).scatter(1, chosen, 1).bool()
    routed = torch.zeros_like(logits).scatter(1, chosen, probs)
    ids = torch.randint(512, (tokens,), generator=draw).to(device)

    def routed_and_back() -> torch.Tensor:
        permuted = permute(x, routing, probs=routed, num_out_tokens=tokens * most)
        values, order = permuted[0], permuted[2]
        return unpermute(values, order, x.shape, probs=routed, routing_map=routing).float()

    def routed_backward() -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        permute(leaf, routing, probs=routed, num_out_tokens=tokens * most)[0].float().square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad.float()

    def embedding_backward() -> torch.Tensor:
        table = torch.zeros(512, hidden, device=device, requires_grad=True)
        torch.nn.functional.embedding(ids, table).mul(x.float()).sum().backward()
        assert table.grad is not None
        return table.grad

    def attention_backward() -> torch.Tensor:
        parts = [x.view(1, -1, 8, hidden // 8)[:, :1024].transpose(1, 2).detach().requires_grad_() for _ in range(3)]
        torch.nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True).sum().backward()
        return torch.cat([part.grad.flatten() for part in parts if part.grad is not None]).float()

    return {
        "unpermute": routed_and_back, "permute, backward": routed_backward,
        "embedding, backward": embedding_backward, "attention, backward": attention_backward,
        "product": lambda: (x @ x.T).float(),
    }  # fmt: skip


def snapshot_cost(report: Report) -> None:
    """Time iterations without snapshots, and with windows of 4 and of 1."""
    windows = ("4", "1") if torch.cuda.is_available() else ("4",)
    with tempfile.TemporaryDirectory() as folder:
        base = _iteration_s(pretrain(Path(folder, "plain"), ITERATIONS))
        records = {window: pretrain(Path(folder, window), ITERATIONS, *SNAPSHOTS, window) for window in windows}
        report.figure("iteration without snapshots", 1e3 * base, "ms")
        for window, record in records.items():
            seconds, stall = _iteration_s(record), _median(record, "stall_s")
            report.figure(f"window {window}: iteration", 1e3 * seconds, "ms")
            report.figure(f"window {window}: copied in an iteration", _median(record, "copied_bytes") / 1e9, "GB")
            report.figure(f"window {window}: more than without", 1e3 * (seconds - base), "ms")
            report.figure(f"window {window}: stall as reported", 1e3 * stall, "ms")
            if torch.cuda.is_available():
                report.claim(
                    f"window {window}: the stall is what snapshots cost", seconds - base - stall < STALL_ERROR * base
                )


def _iteration_s(record: RunRecord) -> float:
    return _median(record, "iteration_s")


def _median(record: RunRecord, name: str) -> float:
    """Return the median over the second half of the iterations, because the first iterations compile and allocate."""
    values = [line[name] for line in record.metrics()[ITERATIONS // 2 :] if line.get(name) is not None]
    return float(statistics.median(values))
