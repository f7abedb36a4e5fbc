"""Checks of process groups that ``AbortAll`` aborts, and of collectives that span nodes.

Ranks abort groups in three situations: with work in the queue, while another rank waits in a collective, and seconds
after other ranks.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.state import State

from benchmarks.gpu import shared
from benchmarks.gpu.check import Report
from benchmarks.gpu.processes import call_ranks
from moevement_core.restart.abort import AbortAll
from moevement_core.restart.connections import listening
from moevement_core.restart.groups import forget_groups
from moevement_core.restart.leaving import Leaving

GENERATIONS = 20
LEFT_BYTES = 256 << 20
"""Bytes by which used device memory may grow from the third generation to the last."""
ABORT_S = 10.0
"""Seconds that an abort may take with two seconds of work queued."""
QUEUED_S, BEHIND_WORK = 2.0, 3
"""Seconds of queued work, and the number of generations that have it. Later generations have no queued work."""
COLLECTIVE_S = timedelta(seconds=20)
LEAVE_S = 2.0
"""Seconds within which a rank must leave a collective after another rank has aborted it."""
SKEW_S = 5.0


def abort_alone(report: Report) -> None:
    """Abort a communicator of one rank several times with work queued, first with torch's cache kept, then emptied."""
    is_gpu = torch.cuda.is_available()
    for empties in (False, True) if is_gpu else (False,):
        case = call_ranks(
            generations, 1, 50, number=GENERATIONS // 2 if is_gpu else 2, queued_s=QUEUED_S if is_gpu else 0.0,
            empties=empties,
        )[0]  # fmt: skip
        _report_generations(report, f"cache {'emptied' if empties else 'kept'}", case)


def nvls(report: Report) -> None:
    """Abort groups of all ranks twenty times with NVLS off and on, and measure the rate of an all-reduce."""
    is_gpu = torch.cuda.is_available()
    world = torch.cuda.device_count() if is_gpu else 2
    for value in ("0", "1") if is_gpu else ("0",):
        cases = call_ranks(
            generations, world, 110, [{"NCCL_NVLS_ENABLE": value}] * world, number=GENERATIONS if is_gpu else 2
        )
        _report_generations(report, f"NCCL_NVLS_ENABLE={value}", cases[0])


def _report_generations(report: Report, name: str, case: Any) -> None:
    if not isinstance(case, dict):
        report.claim(f"{name}: every generation ends ({case})", False)
        return
    report.figure(f"{name}: abort, median", statistics.median(case["abort_s"]), "s")
    report.figure(f"{name}: abort, longest", max(case["abort_s"]), "s")
    report.figure(f"{name}: all-reduce of 64 MB", 1e3 * statistics.median(case["reduce_s"]), "ms")
    report.claim(f"{name}: an abort takes less than {ABORT_S:g} s", max(case["abort_s"]) < ABORT_S)
    if case["used_bytes"]:
        report.figure(f"{name}: device memory by generation", str([used >> 20 for used in case["used_bytes"]]), "MiB")
        settled = case["used_bytes"][min(2, len(case["used_bytes"]) - 1)]
        report.claim(f"{name}: no generation keeps memory", case["used_bytes"][-1] - settled < LEFT_BYTES)


def generations(
    rank: int, world: int, port: int, number: int, queued_s: float = 0.0, empties: bool = False, skew_s: float = 0.0
) -> dict[str, list[float]]:
    """Make, use and abort a group in each generation, and return the seconds and device memory of the generations."""
    device, listeners = device_of(rank), listening()
    measured: dict[str, list[float]] = {"abort_s": [], "used_bytes": [], "reduce_s": []}
    values = torch.ones((16 << 20) if device.type == "cuda" else (1 << 16), device=device)
    for generation in range(number):
        join(rank, world, port=port, name=f"generation {generation}", device=device)
        dist.all_reduce(values)
        _synchronize(device)
        began = time.perf_counter()
        dist.all_reduce(values)
        _synchronize(device)
        measured["reduce_s"].append(time.perf_counter() - began)
        if device.type == "cuda" and queued_s and generation < BEHIND_WORK:
            torch.cuda._sleep(int(queued_s * 1.5e9))
            dist.all_reduce(values)
        if rank == world - 1:
            time.sleep(skew_s)
        began = time.perf_counter()
        _abort(rank, world, port, listeners)
        measured["abort_s"].append(time.perf_counter() - began)
        forget_groups()
        gc.collect()
        if device.type == "cuda":
            if empties:
                torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            measured["used_bytes"].append(total - free)
    return measured


def torn(report: Report) -> None:
    """Let two ranks wait in an all-reduce that a third rank never joins, and abort one of the two."""
    is_gpu = torch.cuda.is_available()
    protocols = ("LL", "LL128", "Simple") if is_gpu else ("",)
    for protocol in protocols:
        for nbytes in (8, 64 << 20) if is_gpu else (8,):
            environment: dict[str, str] = {"NCCL_PROTO": protocol} if protocol else {}
            results = call_ranks(torn_rank, 3, 35, [environment] * 3, nbytes=nbytes)
            name = f"{protocol or 'gloo'}, {nbytes} bytes"
            report.figure(f"{name}: the neighbour's collective", str(results[1]))
            report.claim(
                f"{name}: it gives no number", isinstance(results[1], str) and not results[1].startswith("ended")
            )


def torn_rank(rank: int, world: int, port: int, nbytes: int) -> str:
    """Return the outcome of this rank's collective. Rank 2 never joins it, and rank 0 aborts it."""
    device, listeners = device_of(rank), listening()
    join(rank, world, port=port, name="torn", device=device)
    dist.all_reduce(torch.ones(1, device=device))
    _synchronize(device)
    store = _store(port, "torn marks")
    if rank == 2:
        store.wait(["neighbour is done"], COLLECTIVE_S)
        return "never came"
    values = torch.ones(nbytes // 4, device=device)
    ended: list[str] = []

    def reduce() -> None:
        device_of(rank)  # the call sets the current device of this thread
        try:
            work = dist.all_reduce(values, async_op=True)
            assert work is not None
            if device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
            store.add("in", 1)
            work.wait()
            if device.type == "cuda":
                while not event.query():
                    time.sleep(0.01)
            ended.append(f"ended with {float(values[0]):g}")
        except Exception as error:
            ended.append(f"raised {type(error).__name__}")

    thread = threading.Thread(target=reduce, daemon=True)
    thread.start()
    while store.add("in", 0) < 2:
        time.sleep(0.01)
    time.sleep(0.5)
    if rank == 0:
        _abort(rank, world, port, listeners)
        store.set("aborted", "")
        store.wait(["neighbour is done"], COLLECTIVE_S)
        return "aborted"
    store.wait(["aborted"], COLLECTIVE_S)
    thread.join(LEAVE_S)
    store.set("neighbour is done", "")
    return ended[0] if ended else f"waits after {LEAVE_S:g} s"


def skewed(report: Report) -> None:
    """Let the last rank of a node abort seconds after the others, with NCCL's cuMem memory and without."""
    is_gpu = torch.cuda.is_available()
    world = shared.RANKS if shared.is_shared() else torch.cuda.device_count() if is_gpu else 2
    for value in ("1", "0") if is_gpu else ("1",):
        results = call_ranks(
            generations, world, 55, [{"NCCL_CUMEM_ENABLE": value}] * world, number=2,
            skew_s=SKEW_S if is_gpu else 0.2,
        )  # fmt: skip
        failed = [text for text in results if isinstance(text, str)]
        report.figure(f"NCCL_CUMEM_ENABLE={value}: ranks that failed", len(failed))
        if failed:
            report.figure(f"NCCL_CUMEM_ENABLE={value}: the first of them", failed[0][-300:])
        report.claim(f"NCCL_CUMEM_ENABLE={value}: no rank fails", not failed)


def split(report: Report) -> None:
    """Time collectives of a layer, with all ranks on one node and with one rank that NCCL sees on another node."""
    is_gpu = torch.cuda.is_available()
    world = torch.cuda.device_count() if is_gpu else 2
    cases: dict[str, list[Mapping[str, str]]] = {"one node": [{}] * world}
    if is_gpu:
        elsewhere = {"NCCL_HOSTID": "another-node"}
        cases["last rank on another node"] = [*[{"NCCL_HOSTID": "this-node"}] * (world - 1), elsewhere]
    times = {}
    for name, environments in cases.items():
        times[name] = call_ranks(layer_collectives, world, 50, environments)[0]
        if isinstance(times[name], str):
            report.claim(f"{name}: collectives work ({times[name][-300:]})", False)
            continue
        for what, seconds in times[name].items():
            report.figure(f"{name}: {what}", 1e3 * seconds, "ms")
    report.figure("the other node", "is this one: the path goes over the network interface, or loopback")


def layer_collectives(rank: int, world: int, port: int) -> dict[str, float]:
    """Return the seconds of an all-reduce and of an all-to-all of a layer's size."""
    device = device_of(rank)
    join(rank, world, port=port, name="layer", device=device)
    elements = (32 << 20) if device.type == "cuda" else (1 << 14)
    values = torch.ones(elements // world * world, device=device)
    received = torch.empty_like(values)
    seconds = {}
    for name, run in (
        ("all-reduce", lambda: dist.all_reduce(values)),
        ("all-to-all", lambda: dist.all_to_all_single(received, values)),
    ):
        run()
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(5):
            run()
        _synchronize(device)
        seconds[name] = (time.perf_counter() - began) / 5
    return seconds


def device_of(rank: int) -> torch.device:
    """Return the device of a rank, and make it the current one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = rank % torch.cuda.device_count()
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _store(port: int, prefix: str) -> Any:
    return dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False))


def join(rank: int, world: int, port: int, name: str, device: torch.device) -> None:
    """Join the default group of a check, over NCCL on a GPU and gloo on a CPU."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=_store(port, name), rank=rank, world_size=world, timeout=timedelta(minutes=2)
    )


def _abort(rank: int, world: int, port: int, listeners: Collection[int]) -> None:
    """Abort as the monitoring thread of a rank does, but keep connections to the store of the check."""
    AbortAll(store={("127.0.0.1", port)}, groups=set(), before=lambda: None, leaving=Leaving(), listeners=listeners)(
        State(rank, world).freeze()
    )
