"""Benchmark of two ways to connect a job's process groups again after a failure. It writes benchmarks/reconfigure.md.

    python -m benchmarks.reconfigure        (torch 2.14 or newer; a minute)

Ranks of one machine make the groups of a Megatron job over gloo. One set of ranks destroys its groups and makes them
anew, as a recovery does. The other keeps its groups and connects them again by ``ProcessGroup.reconfigure`` of torch.
The two sets take turns, and each turn ends with a reduction in every group. After the last turn, the second set loses a
rank, closes its connections, and connects a new process.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from megatron.moevement import platform
from moevement_core.restart.connections import shut_down
from moevement_core.util.tcp import Ends

OUTPUT = Path(__file__).with_suffix(".md")
RANKS = 4
LOST = 2
"""Rank that is replaced after the last turn."""
LIMIT = timedelta(seconds=60)
CLOSE_S = 1.0
"""Seconds from the death of the lost rank until the others close their connections."""
SURVIVES = "took its place, and reductions had the right sums"
"""End of the sentence on the new process, if it could replace the lost rank."""


def main() -> None:
    """Measure both ways in turns, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--out", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    if not hasattr(dist.ProcessGroup, "reconfigure"):
        sys.exit(f"torch {torch.__version__} has no ProcessGroup.reconfigure; use torch 2.14 or newer")
    platform.install()
    from megatron.core import parallel_state  # noqa: F401  Ranks are forked from here, and share what is imported.

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    fork = multiprocessing.get_context("fork")
    ways: tuple[Callable[..., None], ...] = (_makes_anew, _reconfigures)
    processes = [
        fork.Process(target=way, args=(rank, server.port, arguments.turns)) for way in ways for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    seconds: dict[str, list[float]] = {way.__name__: [] for way in ways}
    for turn in range(arguments.turns):
        for way in ways if turn % 2 else reversed(ways):
            server.set(f"{way.__name__}/{turn}", "go")
            answers = [f"{way.__name__}/{turn}/{rank}" for rank in range(RANKS)]
            server.wait(answers)
            seconds[way.__name__].append(max(float(server.get(answer)) for answer in answers))
    processes[RANKS + LOST].join()
    replacement = fork.Process(target=_replaces, args=(LOST, server.port, arguments.turns))
    replacement.start()
    for process in (*processes, replacement):
        process.join()
    sums = {int(server.get(f"sum/{rank}")) for rank in range(RANKS)}
    groups = int(server.get("groups"))
    arguments.out.write_text(report(seconds, groups, sums == {sum(range(RANKS))}), encoding="utf-8")


def _makes_anew(rank: int, port: int, turns: int) -> None:
    """Destroy all groups of this rank and make them anew, in each turn of this way."""
    store = _connect(port)
    for turn in range(turns):
        store.wait([f"_makes_anew/{turn}"])
        began = time.perf_counter()
        if dist.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        _make(dist.PrefixStore(f"anew{turn}", store), rank)
        _use()
        store.set(f"_makes_anew/{turn}/{rank}", str(time.perf_counter() - began))


def _reconfigures(rank: int, port: int, turns: int) -> None:
    """Connect all groups of this rank again, in each turn of this way; lose a rank after the last turn."""
    store = _connect(port)
    _make_for_reconfiguration(store, rank)
    for turn in range(turns):
        store.wait([f"_reconfigures/{turn}"])
        began = time.perf_counter()
        _reconfigure(store, rank, turn)
        _use()
        store.set(f"_reconfigures/{turn}/{rank}", str(time.perf_counter() - began))
    if rank == LOST:
        os._exit(1)
    if rank == 0:
        store.set("groups", str(len(_groups())))
    # Rank 0 waits for a live rank, so the abort of torch would not end its wait.
    threading.Timer(CLOSE_S, shut_down, [functools.partial(_is_of_groups, port)]).start()
    with suppress(RuntimeError):
        _use()
    time.sleep(2 * CLOSE_S)
    _continue(store, rank, turns)


def _replaces(rank: int, port: int, turns: int) -> None:
    """Run as the new process of the lost rank."""
    store = _connect(port)
    _make_for_reconfiguration(store, rank)
    _continue(store, rank, turns)


def _continue(store: dist.Store, rank: int, turn: int) -> None:
    _reconfigure(store, rank, turn)
    _use()
    total = torch.tensor(rank)
    dist.all_reduce(total)
    store.set(f"sum/{rank}", str(total.item()))
    os._exit(0)  # Gloo's destructors would wait for connections that other ranks have closed.


def _connect(port: int) -> dist.Store:
    torch.set_num_threads(1)
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)


def _make(store: dist.Store, rank: int, **options: Any) -> None:
    """Make the groups of a job with two stages and two expert-parallel ranks, as Megatron makes them."""
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=LIMIT, **options)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, expert_model_parallel_size=2, create_gloo_process_groups=False
    )


def _make_for_reconfiguration(store: dist.Store, rank: int) -> None:
    """Make the same groups without connecting them. Torch's ``new_group`` has no option for this (torch 2.15)."""
    gloo: Any = dist.ProcessGroupGloo

    def unconnected(*args: Any, **kwargs: Any) -> Any:
        return gloo(*args, **kwargs | {"enable_reconfigure": True})

    with mock.patch.object(dist.distributed_c10d, "ProcessGroupGloo", unconnected):
        _make(dist.PrefixStore("kept", store), rank, enable_reconfigure=True)


def _groups() -> list[Any]:
    """Return this rank's groups of several ranks, in the order in which it made them."""
    return [group for group in dist.distributed_c10d._world.pg_map if dist.get_world_size(group) > 1]


def _use() -> None:
    for group in _groups():
        dist.all_reduce(torch.ones(1), group=group)


def _reconfigure(store: dist.Store, rank: int, turn: int) -> None:
    """Exchange the handles of all groups of all ranks at once, then connect each group."""
    c10d: Any = dist.distributed_c10d
    names, groups = c10d._world.pg_names, _groups()
    own = {names[group]: c10d._get_reconfigure_handle(group) for group in groups}
    store.set(f"handles/{turn}/{rank}", json.dumps(own))
    handles = [json.loads(store.get(f"handles/{turn}/{other}")) for other in range(RANKS)]
    for group in groups:
        members = [handles[other][names[group]] for other in dist.get_process_group_ranks(group)]
        c10d._reconfigure(uuid=turn + 1, handles=members, group=group, timeout=LIMIT).wait()


def _is_of_groups(port: int, ends: Ends) -> bool:
    return all(end is None or end[1] != port for end in (ends.local, ends.remote))


def report(seconds: dict[str, list[float]], groups: int, survives: bool) -> str:
    """Return the text of the page.

    Args:
        seconds: seconds of each turn on its slowest rank, by way.
        groups: number of groups of several ranks that rank 0 is in.
        survives: True if a new process took the place of the lost rank.
    """
    rows = []
    for way, name in (("_makes_anew", "make all groups anew"), ("_reconfigures", "`reconfigure` each kept group")):
        turns = sorted(seconds[way])
        median, tenth, ninth = statistics.median(turns), turns[len(turns) // 10], turns[-1 - len(turns) // 10]
        rows.append([name, f"{1e3 * median:.0f}", f"{1e3 * tenth:.0f}", f"{1e3 * ninth:.0f}", str(len(turns))])
    outcome = SURVIVES if survives else "could not take its place"
    return f"""# Process groups that are connected again

    python -m benchmarks.reconfigure        (writes this file; torch 2.14 or newer)

{RANKS} ranks of one machine (pipeline 2 x expert 2) connect Megatron's groups over gloo, and use each group once. Rank 0 is in {groups}
groups of several ranks. Both ways take turns. Numbers are milliseconds on the slowest rank.

{table(("way", "median", "tenth percentile", "ninetieth percentile", "turns"), rows)}

Then one rank of the second way died. The others closed their connections, because `abort` does not end a wait of gloo. A new process
{outcome}.

{measured_on("torch", "megatron-core")}, gloo. Other programs used the
machine too: the load average was {os.getloadavg()[0]:.0f}.
"""


if __name__ == "__main__":
    main()
