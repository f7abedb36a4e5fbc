"""The runner of bodies on ranks names the failed rank, never hangs, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from moevement_core.errors import ProcessGroupError
from tests.harness import run_ranks


def _sum_of_ranks() -> float:
    tensor = torch.tensor([float(torch.distributed.get_rank() + 1)])
    torch.distributed.all_reduce(tensor)
    return float(tensor)


def _fail_on_rank_one() -> None:
    if torch.distributed.get_rank() == 1:
        print("printed")
        raise ValueError("broken")
    torch.distributed.barrier()


def _leave_a_child_and_wait_for_ever() -> None:
    print("child", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
    time.sleep(600)


def _exit_with(code: int) -> None:
    sys.exit(code)


def test_ranks_meet_and_return() -> None:
    assert [outcome.result for outcome in run_ranks(_sum_of_ranks, 3)] == [6.0, 6.0, 6.0]


def test_the_failing_rank_is_named_with_its_traceback_and_its_peers_do_not_hang() -> None:
    started = time.monotonic()
    with pytest.raises(ProcessGroupError, match=r"(?s)\brank 1\b\D*\b1\b.*ValueError: broken.*\bprinted\b"):
        run_ranks(_fail_on_rank_one, 2)
    assert time.monotonic() - started < 30


def test_a_killed_rank_is_named() -> None:
    def kill_rank_two(pids: list[int]) -> None:
        os.kill(pids[2], signal.SIGKILL)

    with pytest.raises(ProcessGroupError, match=r"\brank 2\b.* -9\b"):
        run_ranks(_leave_a_child_and_wait_for_ever, 3, init_process_group=False, on_started=kill_rank_two)


def test_nothing_is_left_of_ranks_that_ran_out_of_time() -> None:
    with pytest.raises(ProcessGroupError, match=r"\[0\].*\b3 s\b") as caught:
        run_ranks(_leave_a_child_and_wait_for_ever, 1, timeout_s=3, init_process_group=False)
    child = int(str(caught.value).split("child ")[1].split()[0])
    deadline = time.monotonic() + 5
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_exit_codes_come_back() -> None:
    outcomes = run_ranks(_exit_with, 2, 2, init_process_group=False, check=False)
    assert [outcome.exit_code for outcome in outcomes] == [2, 2]
