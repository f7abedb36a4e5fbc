"""Memory of a node, the share that a rank may use of it, and the error if that is too little."""

from __future__ import annotations

import math
import re
from pathlib import Path
from unittest.mock import patch

import pytest

from moevement_core.engine.config import BudgetConfig, KeepOwn
from moevement_core.errors import ConfigError
from moevement_core.topology.host_budget import Allowed, AtPeer, Needs, allowed, decide_keep_own
from moevement_core.util.host_memory import NodeMemory, node_memory

GB = 10**9


def group(root: Path, cgroup: str, **limits: str) -> Path:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for key, limit in limits.items():
        folder, _, name = key.rpartition("/")
        (root / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / folder / name).write_text(limit)
    return root


def test_the_smallest_limit_around_a_process_counts(tmp_path: Path) -> None:
    root = group(
        tmp_path, "0::/slurm/job_7\n",
        **{"slurm/job_7/memory.max": "max\n", "slurm/memory.max": "8000000000\n", "memory.max": "9000000000"},
    )  # fmt: skip
    assert node_memory(root) == NodeMemory(8 * GB, is_limited=True)
    assert re.search(r"\b8\.0 GB\b.*\bcontrol group\b", str(node_memory(root)))


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    root = group(
        tmp_path, "5:cpu,cpuacct:/a\n4:memory:/docker/x\n",
        **{"memory/docker/x/memory.limit_in_bytes": "3000000000", "memory/memory.limit_in_bytes": str(2**63 - 4096)},
    )  # fmt: skip
    assert node_memory(root) == NodeMemory(3 * GB, is_limited=True)


def test_without_limits_it_is_all_that_the_node_has(tmp_path: Path) -> None:
    with patch("psutil.virtual_memory") as memory:
        memory.return_value.total = 64 * GB
        assert node_memory(tmp_path) == NodeMemory(64 * GB, is_limited=False)
        with patch("moevement_core.topology.host_budget.node_memory", lambda: node_memory(tmp_path)):
            share = allowed(budget(), ["a", "a", "b", "a", "a"], 3)
    assert share.nbytes == 8 * GB
    assert re.search(r"\b50%.*\b64\.0 GB\b.*\bnode\b.*\b4 ranks\b", share.why)


def budget(limit_gb: float | None = None, keep_own: KeepOwn = KeepOwn.AUTO) -> BudgetConfig:
    return BudgetConfig(limit_gb, keep_own, None, None, math.inf)


def test_what_the_flag_says_counts_and_what_is_not_known_has_no_cap() -> None:
    assert allowed(budget(5.0), ["a"], 0) == Allowed(5.0, "--moevement-host-memory-gb")
    assert allowed(budget(), ["a"], 0, is_bounded=False).nbytes == math.inf


def kept(copies: int):
    return lambda snapshots: [
        sum(snapshots[(rank + step) % len(snapshots)].nbytes for step in range(1, copies + 1))
        for rank in range(len(snapshots))
    ]


def needs(has: float, log: int = 0) -> list[Needs]:
    return [Needs(GB, GB // 4, AtPeer(GB), log, Allowed(has * GB, "said so")) for _ in range(4)]


@pytest.mark.parametrize(
    ("has", "keep_own", "keeps"),
    [(3.0, KeepOwn.AUTO, True), (2.9, KeepOwn.AUTO, False), (9, KeepOwn.NEVER, False), (3.0, KeepOwn.ALWAYS, True)],
)
def test_own_copies_go_where_there_is_no_room_for_them(has: float, keep_own: KeepOwn, keeps: bool) -> None:
    keeps_own_copies, total = decide_keep_own(needs(has), kept(2), budget(keep_own=keep_own), 6, [], may_drop=True)
    assert keeps_own_copies is keeps
    assert total.own == (GB if keeps else GB // 4)


@pytest.mark.parametrize(
    ("has", "keep_own", "log", "change"),
    [
        (2.9, KeepOwn.ALWAYS, 0, "--moevement-keep-own auto"),
        (2.5, KeepOwn.AUTO, GB, "--moevement-log-memory-gb 0.250"),
        (1.5, KeepOwn.AUTO, 0, "--moevement-replicas 1"),
        (1.0, KeepOwn.AUTO, 0, "--moevement-replicas 0"),
        (0.1, KeepOwn.AUTO, 0, "--moevement-host-memory-gb 2.250"),
    ],
)
def test_the_cheapest_change_that_makes_it_fit_is_named(has: float, keep_own: KeepOwn, log: int, change: str) -> None:
    changes = [("--moevement-replicas 1", kept(1)), ("--moevement-replicas 0", kept(0))]
    with pytest.raises(ConfigError, match=rf"\brank 0\b.*\bW = 6\b.* {has:.3f} GB\b.*{re.escape(change)}\b"):
        decide_keep_own(needs(has, log), kept(2), budget(keep_own=keep_own), 6, changes, may_drop=True)


def test_what_is_written_to_disk_from_here_is_kept() -> None:
    with pytest.raises(ConfigError, match=r"\brank 0\b.*\b3\.000 GB\b"):
        decide_keep_own(needs(2.9), kept(2), budget(), 6, [], may_drop=False)
