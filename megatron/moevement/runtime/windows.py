"""Order and window of a run: what is counted and measured for them, and what every rank comes to for the next window.

All collectives of that stand here: popularity is summed over the stage, windows and host memory are the job's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.moevement.restart import injection
from megatron.moevement.runtime.policy import Policy
from megatron.moevement.runtime.ranks import tell_all
from megatron.moevement.runtime.wiring import Wiring
from megatron.moevement.sparse_config import MOST_ITERATIONS, SparseConfig
from megatron.moevement.transformer.popularity import RouterCounts
from moevement_core.errors import ConfigError
from moevement_core.injection import Phase
from moevement_core.policy.popularity import Popularity
from moevement_core.policy.reorder import ReorderTrigger
from moevement_core.policy.schedule import LAG_ALLOWANCE, Schedule, ScheduleHistory, iterations_logged, slots_kept
from moevement_core.policy.window import Budget, choose_window, impose_window
from moevement_core.replication.placement import sources_of
from moevement_core.replication.sender import Sender
from moevement_core.snapshot.checkpointer import Checkpointer

FIRST_WINDOW = 8
"""W before anything is measured."""
WARM_UP = 8
"""Iterations that are measured before W is chosen."""
NETWORK_HEADROOM = 0.8
"""Share of the measured rate that a slot may need: peers that are only just in time abandon windows at every delay."""


class WindowDecisions:
    """Of one rank; every rank calls alike, so that all come to the same.

    Args:
        chunks: the rank's model.
        wiring: of this generation; :attr:`wiring` is replaced in the next.
        config: the flags.
        report: told what an operator of the job should know.
        sent_bytes: that this rank logs of an iteration.
    """

    def __init__(
        self,
        chunks: list[Any],
        wiring: Wiring,
        config: SparseConfig,
        report: Callable[[str], None],
        sent_bytes: int,
    ) -> None:
        self.wiring, self._config, self._report, self._sent_bytes = wiring, config, report, sent_bytes
        self._counts = RouterCounts(chunks, wiring.table, config.ordering.ordering)
        self._pending: list[torch.Tensor] = []
        self.popularity = Popularity(wiring.table, config.ordering)
        self.trigger = ReorderTrigger(wiring.table, config.thresholds)
        self.decided = config.window is not None
        """Whether W is no longer to be measured."""
        self._steps_s: list[float] = []
        self.windows = self.reorders = 0

    def adopt(self, policy: Policy) -> None:
        """Go on from what a stage has decided."""
        self.popularity.scores, self.trigger.reference = policy.scores, policy.reference
        self.decided = policy.decided

    # Once an iteration

    def count(self) -> None:
        """Take the tokens that the routers have counted since; at the beginning of an iteration."""
        self._pending.append(self._counts.take())

    def measured(self, step_s: float) -> None:
        """An iteration took so long, stalls left out."""
        self._steps_s.append(step_s)

    @property
    def iteration_s(self) -> float:
        """Seconds that an iteration takes, the middle one of those of this process; 0 before any."""
        return statistics.median(self._steps_s) if self._steps_s else 0.0

    def pause(self, is_paused: bool) -> None:
        """Tokens of a replay are not counted again."""
        self._counts.paused = is_paused

    def forget(self) -> None:
        """Drop what was counted on the way to a failure, and measured if W is still to be chosen."""
        self._counts.take()
        self._pending.clear()
        if not self.decided:
            self._steps_s.clear()

    # The first window

    def first(self, start: int, buffer_bytes: Callable[[Schedule], int]) -> ScheduleHistory:
        """Until something is measured.

        Args:
            start: the iteration whose state the run begins from. One window comes before it, which holds that state.
            buffer_bytes: host memory of one snapshot of this rank under a schedule.

        Raises:
            ConfigError: a rank needs more host memory than it may use; on every rank.
        """
        size = self._first_size()
        order = self.popularity.order()
        window = impose_window(self.wiring.table, order, size, self._config.window_kind)
        first = Schedule(self.wiring.table, order, window, start=start - size)
        self._refuse_beyond_cap(first, buffer_bytes(first))
        return ScheduleHistory(first)

    def _first_size(self) -> int:
        """What was asked for, and never more slots than operators."""
        most = self.wiring.most_operators
        wanted = self._config.window or FIRST_WINDOW
        if self._config.window is not None and wanted > most and self.wiring.rank == 0:
            self._report(
                f"--moevement-window {wanted}: no stage has more than {most} operators; the window is {most} iterations"
            )
        return min(wanted, most)

    def slots(self, size: int) -> int:
        """Snapshots that a rank keeps at most."""
        return slots_kept(size, LAG_ALLOWANCE, to_disk=self._config.persist_dir is not None)

    def iterations_logged(self, size: int) -> int:
        """How many iterations logs and records reach back at most."""
        return iterations_logged(size, LAG_ALLOWANCE, to_disk=self._config.persist_dir is not None)

    def log_bytes(self, size: int) -> int:
        """Host memory that the boundary log of this rank takes at most."""
        return int(min(self.iterations_logged(size) * self._sent_bytes, self._config.log_memory_bytes))

    def _refuse_beyond_cap(self, schedule: Schedule, own_bytes: int) -> None:
        """Compare what every rank will need with the cap, on every rank alike.

        The rank that needs the most is named, so that what the message says is enough for all.
        """
        count = self.slots(schedule.size)
        told = tell_all((own_bytes, self.log_bytes(schedule.size)))
        needs = []
        for rank, (its_bytes, logs) in enumerate(told):
            sources = sources_of(self.wiring.peers, rank)
            own, kept = count * its_bytes, sum((count + 1) * told[source][0] for source in sources)
            needs.append((own + kept + logs, -rank, own, kept, logs, len(sources)))
        needed, rank, own, kept, logs, sources_ = max(needs)
        if needed > self._config.host_memory_bytes:
            raise ConfigError(
                f"--moevement-host-memory-gb {self._config.host_memory_bytes / 1e9:g}: rank {-rank} needs "
                f"{math.ceil(needed / 1e6) / 1e3:.3f} GB ({own / 1e9:.3f} for its own snapshots, {kept / 1e9:.3f} for "
                f"those of {sources_} peers, {logs / 1e9:.3f} for logs, at W = {schedule.size}), and no rank more; "
                "give that much, or fewer replicas, or another window"
            )

    # Those after it

    def decide(self, boundary: int, checkpointer: Checkpointer, senders: Sequence[Sender]) -> None:
        """Order and window of the window that begins with ``boundary``.

        Orders are the stage's and windows the job's, so every rank takes part in every collective here, whether or not
        it wants a change itself.
        """
        self._observe()
        injection.at(Phase.DECIDE)
        history = checkpointer.history
        old = history.newest
        reorder = self.trigger.should_reorder(self.popularity.scores)
        order = self.popularity.order() if reorder else old.order
        measured = not self.decided and len(self._steps_s) >= WARM_UP
        size = self._measured_window(order, checkpointer, senders) if measured else old.size
        self.windows += 1
        if math.isinf(self._config.host_memory_bytes) and not reorder and size == old.size:
            self.decided = self.decided or measured
            return
        wanted = [self._schedule(order, size), self._schedule(order, old.size)]
        beyond = self._beyond_cap(wanted, checkpointer)
        fitting = [schedule for schedule, is_beyond in zip(wanted, beyond, strict=True) if not is_beyond]
        if any(beyond) and self.wiring.rank == 0:
            self._report(
                f"a window of {size} iterations needs more host memory than --moevement-host-memory-gb "
                f"{self._config.host_memory_bytes / 1e9:g}; the window stays at {old.size}"
            )
        if not fitting:
            return
        chosen = fitting[0]
        self.decided = self.decided or measured
        if reorder:
            self.trigger.ordered(self.popularity.scores)
            self.reorders += 1
        if not reorder and chosen.size == old.size:
            return
        schedule = history.change(boundary - 1, order, chosen.window)
        checkpointer.make_room(schedule)
        history.forget_before(max(checkpointer.oldest_needed, history.oldest.start))
        if chosen.size != old.size and self.wiring.rank == 0:
            self._report(f"window of {size} iterations from iteration {schedule.start} on, from what was measured")

    def _observe(self) -> None:
        """Sum the counts of the window over the ranks of the stage, iteration by iteration."""
        counts = self._counts.by_operator(self._pending)
        self._pending.clear()
        dist.all_reduce(counts, group=self.wiring.stage_group)
        for one in counts.numpy():
            self.popularity.observe(np.asarray(one))

    def _schedule(self, order: Any, size: int) -> Schedule:
        table = self.wiring.table
        return Schedule(table, order, impose_window(table, order, size, self._config.window_kind))

    def _beyond_cap(self, schedules: list[Schedule], checkpointer: Checkpointer) -> list[bool]:
        """For each of ``schedules`` whether any rank would need more host memory than it may use.

        Without a cap nobody asks: all ranks have the same flags.
        """
        if math.isinf(self._config.host_memory_bytes):
            return [False] * len(schedules)
        own = [checkpointer.memory_needed(schedule) for schedule in schedules]
        mine = torch.tensor([own, [self.log_bytes(schedule.size) for schedule in schedules]])
        everyones = [torch.empty_like(mine) for _ in range(self.wiring.world)]
        dist.all_gather(everyones, mine, group=self.wiring.job_group)
        count = self.slots(checkpointer.history.newest.size)
        needed = [self._needed_by(rank, everyones, count) for rank in range(self.wiring.world)]
        return [bool((one > self._config.host_memory_bytes).any()) for one in torch.stack(needed).T]

    def _needed_by(self, rank: int, everyones: list[torch.Tensor], count: int) -> torch.Tensor:
        """Host memory of ``rank``: for its own snapshots and logs, and of each source one buffer more than its own."""
        kept = [everyones[source][0] for source in sources_of(self.wiring.peers, rank)]
        return everyones[rank].sum(dim=0) + sum(-(-one * (count + 1) // count) for one in kept)

    def _measured_window(self, order: Any, checkpointer: Checkpointer, senders: Sequence[Sender]) -> int:
        """The window that this rank's measurements ask for; of all ranks the largest."""
        d2h, network = self._measured_bandwidths(checkpointer, senders)
        budget = Budget(
            statistics.median(self._steps_s[2:]),
            d2h,
            network * NETWORK_HEADROOM,
            len(self.wiring.peers[self.wiring.rank]),
        )
        own = choose_window(self.wiring.table, order, budget, self._config.window_kind).size
        size = torch.tensor([min(own, MOST_ITERATIONS)])
        dist.all_reduce(size, op=dist.ReduceOp.MAX, group=self.wiring.job_group)
        return int(size)

    def _measured_bandwidths(self, checkpointer: Checkpointer, senders: Sequence[Sender]) -> tuple[float, float]:
        rates = [sender.sent_bytes / sender.send_s for sender in senders if sender.send_s > 0]
        # Without a measurement (peers that have acknowledged nothing yet) the network does not limit.
        network = self._config.network_bytes_per_s or (sum(rates) or float("inf"))
        return self._config.d2h_bytes_per_s or checkpointer.copy_rate(), network
