"""Check of copies to a peer over the connections that snapshots use.

The check measures rates by number of streams and by interface, and how much the copies slow collectives of training.
"""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import suppress

import psutil
import torch
import torch.distributed as dist

from benchmarks.gpu.check import Report
from benchmarks.gpu.collectives import device_of, join
from benchmarks.gpu.processes import call_ranks
from moevement_core.comms.connections import Address, Connections

STREAMS = (1, 2, 4)
ROUNDS = 8
SLOWER = 1.1
"""Largest ratio of the time of collectives beside copies to their time alone."""


def replication(report: Report) -> None:
    """Send from the first rank to the second over each interface of this host, with 1, 2 and 4 streams."""
    is_gpu = torch.cuda.is_available()
    nbytes = (1 << 30) if is_gpu else (4 << 20)
    interfaces = _addresses() if is_gpu else {"lo": "127.0.0.1"}
    for interface, host in interfaces.items():
        for streams in STREAMS if is_gpu else STREAMS[:1]:
            results = call_ranks(replicating_rank, 2, 40, host=host, streams=streams, nbytes=nbytes)
            name = f"{interface}, {streams} streams"
            if isinstance(results[0], str):
                report.figure(name, results[0][-200:])
                continue
            report.figure(f"{name}: copies", results[0]["rate"] / 1e9, "GB/s")
            report.figure(f"{name}: all-to-all beside copies over alone", results[0]["slower"])
            if is_gpu:
                report.claim(f"{name}: collectives are not slowed down", results[0]["slower"] < SLOWER)
    report.figure("both ranks", "are on this host, so copies within the host may bypass the interface")


def replicating_rank(rank: int, world: int, port: int, host: str, streams: int, nbytes: int) -> dict[str, float]:
    """Return the rate of copies to the other rank, and the ratio of collective times with copies and without."""
    device = device_of(rank)
    join(rank, world, port=port, name="replication", device=device)
    connections = Connections(host, streams)
    addresses: list[Address | None] = [None] * world
    dist.all_gather_object(addresses, connections.address)
    connections.open(rank, [address for address in addresses if address is not None])
    channel = connections.channel("snapshots")
    copies = torch.zeros(nbytes, dtype=torch.uint8)
    values = torch.ones((4 << 20) if device.type == "cuda" else (1 << 14), device=device)
    received = torch.empty_like(values)

    def collectives(rounds: int) -> float:
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            dist.all_to_all_single(received, values)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def move() -> None:
        for _ in range(ROUNDS):
            if rank == 0:
                channel.send(1, 0, copies)
            else:
                channel.receive(0, 0, copies)

    collectives(3)
    alone = collectives(20)
    dist.barrier()
    thread = threading.Thread(target=move)
    began = time.perf_counter()
    thread.start()
    beside = collectives(20)
    thread.join()
    rate = ROUNDS * nbytes / (time.perf_counter() - began)
    dist.barrier()
    return {"rate": rate, "slower": beside / alone}


def _addresses() -> dict[str, str]:
    """Return an address of each interface that is up."""
    by_interface = {}
    for name, addresses in psutil.net_if_addrs().items():
        with suppress(KeyError, StopIteration):
            if psutil.net_if_stats()[name].isup:
                by_interface[name] = next(address.address for address in addresses if address.family.name == "AF_INET")
    return by_interface
