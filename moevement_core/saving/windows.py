"""Measurements for the decisions of a strategy, and agreement of all ranks on the decisions, window by window.

This module makes all collectives for decisions. The ranks of a stage sum their token counts. All ranks of the job agree
on windows and host memory.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from moevement_core import log
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.comms.tree import Reduction
from moevement_core.engine.checkpointer import Checkpointer
from moevement_core.engine.config import FEWEST_COPIES, BudgetConfig
from moevement_core.engine.memory import SnapshotMemory
from moevement_core.errors import ConfigError
from moevement_core.overhead.cap import Evidence
from moevement_core.overhead.job_cost import JobCost
from moevement_core.overhead.meter import OverheadMeter
from moevement_core.policy.partial_experts import LostTokens
from moevement_core.policy.recoverable import RecoverableRun
from moevement_core.policy.schedule import LAG_ALLOWANCE, Schedule, ScheduleHistory, is_other_window
from moevement_core.replication.link_rate import LinkRate
from moevement_core.replication.sender import Sender
from moevement_core.restart import injection
from moevement_core.restart.faults import Phase
from moevement_core.saving.stage_policy import Policy
from moevement_core.snapshot.agreement import MOST_PERIOD
from moevement_core.strategies import Measured, Proposal, Strategy
from moevement_core.strategies.capabilities import BoostsExperts, ChoosesRecovery, CountsTokens, LosesUpdates
from moevement_core.strategies.redo import NOT_CARRIED
from moevement_core.topology.host_budget import Allowed, AtPeer, Kept, Needs, Total, decide_keep_own, totals
from moevement_core.topology.topology import Topology
from moevement_core.trainer.capabilities import Counts, ExpertRoom
from moevement_core.util.iterations import is_newer
from moevement_core.util.words import counted

WARM_UP = 8
"""Iterations that are measured before W is chosen."""
MOST_STEPS = 512
"""Number of newest iterations whose measurements stay when older ones are dropped, once twice as many are kept."""
NETWORK_HEADROOM = 0.5
"""Largest share of the measured network rate that the snapshots of a window may need.

Training uses the same links. Without a reserve, each delay would leave senders behind, and a window would be abandoned.
"""
MOST_SIZES, NOTHING_MEASURED = 4, -1
"""Largest number of window sizes that ranks agree on at once, and the value that stands for a missing measurement."""
SHORTEST_ROLLBACK = 1.5
"""Mean rollback in iterations if every iteration can be restored: one for its copy, and half of the interrupted one."""
DECIDED_EVERY = 8
"""Approximate number of iterations between two decisions on windows."""


class _Step(NamedTuple):
    """Measurements of one training iteration."""

    train_s: float
    """Seconds of training without stalls."""
    stall_s: float
    is_saving: bool
    """True if a snapshot was copied, sent or written during the iteration."""


class WindowDecisions:
    """Decisions about windows on one rank. Collective: all ranks call each method in the same order.

    Args:
        strategy: strategy that decides.
        meter: meter of the cost of saving on this rank.
        counts: counters of the rank's routers; None if the strategy needs no token counts.
        room: control of extra expert capacity; None if experts get no extra capacity.
        topology: topology of this generation. Each later generation sets :attr:`topology` anew.
        budget: resources that checkpointing may use.
        allowed: host memory that this rank may use.
        asked_window: value of ``--moevement-window``; None to choose W from measurements.
        report: function that logs a line for the people who run the job.
        sent_bytes: bytes that this rank adds to the boundary log in an iteration.
        to_disk: True if windows are written to disk.
        began_at: iteration that the job started from.
        default_cap: share of training time that saving may cost, or more while ranks fail often. None: failures do not
            change what it may cost.
    """

    def __init__(
        self,
        strategy: Strategy,
        meter: OverheadMeter,
        counts: Counts | None,
        room: ExpertRoom | None,
        topology: Topology,
        budget: BudgetConfig,
        allowed: Allowed,
        report: Callable[[str], None],
        sent_bytes: int,
        *,
        asked_window: int | None,
        to_disk: bool,
        began_at: int,
        default_cap: float | None = None,
    ) -> None:
        self.strategy, self.topology, self._budget, self._meter = strategy, topology, budget, meter
        self._report, self._sent_bytes = report, sent_bytes
        self._counts, self._room, self._asked_window, self._to_disk = counts, room, asked_window, to_disk
        self._began_at, self._default_cap = began_at, default_cap
        self.failures = 0
        """Number of failures from which the job has recovered since it began."""
        self.worth = 0.0
        """Share of training time that saving should cost because ranks fail, at the last decision; 0.0 if unknown."""
        self._counters = [counter for counter in (counts, room) if counter is not None]
        self._pending: dict[Counts, list[torch.Tensor]] = {counter: [] for counter in self._counters}
        self._sums: list[tuple[torch.Tensor, Callable[[], None]]] = []
        """Token counts of the last window, each with the asynchronous reduction that sums them over the stage."""
        self._counted: int | None = None
        """Last iteration whose tokens were read from the counters; None before the first."""
        self._steps: list[_Step] = []
        self.allowed = allowed
        """Host memory that this rank may use."""
        self._decided_at = 0
        """Number of measured iterations at the last decision; later ones belong to the current window."""
        self._counts_again = False
        """True if tokens of re-executed iterations are counted again, because a rollback has lost their updates."""
        self._link_rate = LinkRate()
        self._cost = JobCost()
        self._beyond: Schedule | None = None
        """Schedule that was last reported as too large for host memory; None without one."""
        self._said = ""
        """Kind of recovery that was logged last."""
        self.windows = self.reorders = 0
        self.planned_bytes: int | None = None
        """Bytes of host memory that this rank is expected to need with the chosen window; None if not computed."""

    def adopt(self, policy: Policy) -> None:
        """Continue with the decisions in ``policy``: what the strategy has learned, and whether W is final."""
        self._counts_again = False
        self.failures, self.worth = policy.failures, policy.worth
        self.strategy.adopt(policy.learned)
        self.strategy.settled = policy.settled

    def join(self, policy: Policy) -> None:
        """Continue with the decisions in ``policy`` on a replacement, as :meth:`adopt` does on a survivor.

        The kind of recovery is not logged again, because other processes have logged it.
        """
        self.adopt(policy)
        if isinstance(self.strategy, ChoosesRecovery):
            self._said = self.strategy.reason_prefix(policy.schedules[-1])

    # Once an iteration

    def count(self, committed: int) -> None:
        """Add the tokens that routers have counted up to ``committed`` to the counts of this window.

        Called when the next iteration begins.
        """
        for counter in self._counters:
            self._pending[counter].append(counter.take())
            self._counted = committed

    def measured(self, step_s: float, stall_s: float, *, is_saving: bool) -> None:
        """Add the measurements of an iteration.

        Args:
            step_s: seconds of the iteration, including stalls.
            stall_s: seconds of stalls.
            is_saving: True if a snapshot was copied, sent or written during the iteration.
        """
        self._steps.append(_Step(step_s - stall_s, stall_s, is_saving))
        if len(self._steps) >= 2 * MOST_STEPS:
            del self._steps[:MOST_STEPS]
            self._decided_at = max(0, self._decided_at - MOST_STEPS)

    @property
    def iteration_s(self) -> float:
        """Median seconds of an iteration of this process, without stalls; 0 before the first iteration."""
        return statistics.median(step.train_s for step in self._steps) if self._steps else 0.0

    def pause(self, is_paused: bool) -> None:
        """Pause token counting when a replay begins, and resume it when the replay ends.

        Counting goes on during the replay if the recovery has lost updates, because their tokens must count again.
        """
        for counter in self._counters:
            counter.paused = is_paused and not self._counts_again

    @property
    def tokens_owed(self) -> int:
        """Number of tokens whose updates a recovery lost, less the extra tokens that experts have processed since.

        The number covers only this rank's stage. It is 0 if experts get no extra capacity.
        """
        if self._room is None or not isinstance(self.strategy, BoostsExperts):
            return 0
        return self.strategy.tokens_owed

    def give_room(self) -> None:
        """Give extra capacity in the next iteration to the experts that the strategy names, and to no others."""
        if self._room is not None and isinstance(self.strategy, BoostsExperts):
            self._room.open(self.strategy.boosted_experts())

    def roll_back(self, run: RecoverableRun, learned: Mapping[int, Any]) -> LostTokens:
        """Roll back to a restore point in which operators have state of different iterations.

        From then on, routers count the tokens of repeated iterations again.

        Args:
            run: recoverable run of the stage.
            learned: learned state of the strategy in each snapshot, by iteration.

        Returns:
            Tokens of the stage whose updates are lost.
        """
        self.drop_counts()
        self._counts_again = True
        assert isinstance(self.strategy, LosesUpdates)
        return self.strategy.restored(run, learned, self._counts.tokens_of_run if self._counts is not None else None)

    def drop_counts(self) -> None:
        """Drop all token counts that are not part of a decision yet, because the job goes back."""
        self._sums.clear()
        for counter in self._counters:
            counter.take()
            self._pending[counter].clear()

    def forget(self, committed: int) -> None:
        """Drop counted tokens after a failure, at least those of the interrupted iteration.

        A strategy that loses no updates uses counts only to order operators, so all counts of the current window are
        dropped. A strategy that loses updates must account for every token, so it keeps the counts up to ``committed``.
        """
        if not isinstance(self.strategy, LosesUpdates):
            self.drop_counts()
        elif self._counts_again or is_newer(committed, self._counted):
            self.count(committed)
        else:
            for counter in self._counters:
                counter.take()  # tokens of the interrupted iteration
        self._counts_again = False

    # The first window

    def first(self, start: int, memory: SnapshotMemory, *, is_running: bool) -> ScheduleHistory:
        """Return the schedules that apply until ranks decide from measurements.

        Args:
            start: iteration whose state the job begins from.
            memory: memory of this rank's snapshots; its ``keeps_own_copies`` is set to the decision of all ranks.
            is_running: True if the job has already begun, so that it continues even if memory is short.

        Raises:
            ConfigError: a rank needs more host memory than it may use. Every rank raises it.
        """
        most = self.topology.most_operators
        strategy = self.strategy
        first = strategy.first(start, most)
        instead = strategy.first_without(start, most) if isinstance(strategy, ChoosesRecovery) else None
        if self._asked_window is not None and self._asked_window > most >= first.size and self.topology.rank == 0:
            self._report(
                f"--moevement-window {self._asked_window}: no stage has more than {most} operators; the window is "
                f"{most} iterations"
            )
        try:
            self._refuse_beyond_cap(first, memory)
        except ConfigError as error:  # on every rank
            if is_running:
                if self.topology.rank == 0:
                    self._report(f"training continues with less protection than the flags ask for: {error}")
                return ScheduleHistory(first if instead is None else instead)
            if instead is None:
                raise
            self._refuse_beyond_cap(instead, memory)
            if self.topology.rank == 0:
                self._report(f"the job recovers by replay, because host memory has no space for gradients: {error}")
            return ScheduleHistory(instead)
        return ScheduleHistory(first)

    def iterations_logged(self, schedule: Schedule) -> int:
        """Return the largest number of past iterations whose logs and records are kept."""
        return schedule.retention(LAG_ALLOWANCE, to_disk=self._to_disk).logged

    def log_bytes(self, schedule: Schedule) -> int:
        """Return the bytes of host memory that this rank's boundary log uses while no rank fails."""
        reach = schedule.retention(LAG_ALLOWANCE, to_disk=self._to_disk).logged_at_first
        return int(min(reach * self._sent_bytes, self._budget.log_memory_bytes))

    def _refuse_beyond_cap(self, schedule: Schedule, memory: SnapshotMemory) -> None:
        """Check the host memory that every rank needs, and decide whether ranks keep own snapshots. Collective.

        Raises:
            ConfigError: a rank needs more host memory than it may use. Every rank raises it.
        """
        memory.keeps_own_copies = True
        local = Needs(
            snapshots=memory.here([schedule]), in_flight=memory.in_flight([schedule]),
            at_peer=AtPeer(memory.at_peer([schedule]), *memory.slots_at_peer(schedule), memory.staging),
            log=self.log_bytes(schedule), allowed=self.allowed,
        )  # fmt: skip
        needs = all_gather_objects(local, Needs)
        memory.keeps_own_copies, total = decide_keep_own(
            needs,
            kept=self.topology.kept_bytes,
            budget=self._budget,
            window=schedule.size,
            changes=self._instead(),
            may_drop=self._may_drop,
        )
        per_rank = totals(needs, self.topology.kept_bytes, keeps_own_copies=memory.keeps_own_copies)
        self.planned_bytes = per_rank[self.topology.rank].nbytes
        if self.topology.rank == 0:
            also = "" if memory.keeps_own_copies else "; own snapshots are freed when all peers have them"
            log.info(f"host memory: {total}, of {total.allowed.nbytes / 1e9:.3f} GB ({total.allowed.why}){also}")

    @property
    def _may_drop(self) -> bool:
        """True if a rank may drop own snapshots after all peers have them.

        False if windows are written to disk, if parity is computed from own snapshots, or if some rank has only one
        peer.
        """
        copies = min(map(len, self.topology.peers))
        return not self._to_disk and not self.topology.groups and copies >= FEWEST_COPIES

    def _instead(self) -> list[tuple[str, Kept]]:
        """Return flags that ask for less protection than the present flags, each with the copies that ranks would keep.

        The strongest protection comes first. An error message proposes flags whose copies fit into host memory.
        """
        return [(flag, other.kept_bytes) for flag, other in self.topology.weaker()]

    # Later windows

    def decide(self, boundary: int, checkpointer: Checkpointer, senders: Sequence[Sender]) -> None:
        """Decide the order of operators and the size of the window that begins with ``boundary``.

        The ranks of a stage decide on its order, and all ranks of the job on windows. Every rank therefore takes part
        in every collective here, even if it wants no change.
        """
        self._observe()
        injection.at(Phase.DECIDE)
        strategy, history = self.strategy, checkpointer.history
        old = history.newest
        measured = not strategy.settled and self._is_due(old, boundary)
        sizes = self._measured_windows(old, boundary, checkpointer, senders) if measured else None
        self._decided_at = len(self._steps)
        proposal = strategy.propose(old, sizes)
        self.windows += 1
        if not self._is_change(proposal):
            strategy.settled = strategy.settled or (measured and not strategy.is_tuned)
            self._say_why(proposal)
            return
        needed = self._needed(proposal.schedules, checkpointer)
        beyond = [any(total.beyond > 0 for total in per_rank) for per_rank in needed]
        fitting = [schedule for schedule, is_beyond in zip(proposal.schedules, beyond, strict=True) if not is_beyond]
        if any(beyond) and self.topology.rank == 0:
            self._say_beyond(proposal.schedules[0], fitting[0] if fitting else old)
        if not fitting:
            return
        chosen = fitting[0]
        strategy.settled = strategy.settled or (measured and not strategy.is_tuned)
        strategy.accept(proposal)
        self.reorders += proposal.reorders
        if chosen is proposal.schedules[0]:
            self._say_why(proposal)
        is_other = is_other_window(chosen, old)
        if not proposal.reorders and not is_other:
            return
        if is_other:
            per_rank = needed[proposal.schedules.index(chosen)]
            self.planned_bytes = per_rank[self.topology.rank].nbytes if per_rank else None
        schedule = history.change(boundary - 1, chosen)
        checkpointer.room.make(schedule)
        if (oldest := checkpointer.oldest_needed) is not None:
            history.forget_before(max(oldest, history.oldest.start))
        if is_other:
            self._meter.forget()  # other windows have another cost
        if is_other and measured and self.topology.rank == 0:
            rest = f", every {chosen.size} iterations," if chosen.size > chosen.snapshots else ""
            is_failing = self._default_cap is not None and self.worth > self._default_cap
            why = f", because a rank failed every {self._failures_every(boundary):.0f} iterations" if is_failing else ""
            log.info(
                f"windows of {counted(chosen.snapshots, 'snapshot')}{rest} from iteration {schedule.start} on, "
                f"chosen from measurements{why}"
            )

    def _is_change(self, proposal: Proposal) -> bool:
        """Return True if ranks have to consider a change.

        With a cap on memory, ranks must exchange their memory needs, so the result is True on all ranks if any stage
        wants a change. Without a cap, ranks exchange nothing, so the result is True if this stage wants a change.
        """
        if math.isinf(self.allowed.nbytes):
            return proposal.is_change
        wanted = torch.tensor([int(proposal.is_change)])
        self.topology.channels.job_group.reduce(wanted, Reduction.MAX)
        return bool(wanted.item())

    def _is_due(self, now: Schedule, boundary: int) -> bool:
        """Return True if ranks decide on windows at this boundary. The result is the same on all ranks."""
        age = boundary - self._began_at
        return age >= WARM_UP and age // DECIDED_EVERY > (age - now.size) // DECIDED_EVERY

    def _say_beyond(self, wanted: Schedule, instead: Schedule) -> None:
        """Report that windows like ``wanted`` do not fit into host memory, unless the last report said the same."""
        if self._beyond is not None and not is_other_window(wanted, self._beyond):
            return
        self._beyond = wanted
        self._report(
            f"windows of {counted(wanted.snapshots, 'snapshot')} every {counted(wanted.size, 'iteration')} need more "
            f"host memory than the {self.allowed.nbytes / 1e9:.3f} GB that are allowed ({self.allowed.why}); windows "
            f"of {counted(instead.snapshots, 'snapshot')} every {counted(instead.size, 'iteration')} are used instead"
        )

    def _say_why(self, proposal: Proposal) -> None:
        """Log the kind of recovery and its reason, if the kind differs from the one that was logged last."""
        kind = proposal.why.partition(":")[0]
        if kind and kind != self._said and self.topology.rank == 0:
            log.info(proposal.why)
        self._said = kind or self._said

    def _observe(self) -> None:
        """Sum the token counts of the window over the ranks of the stage, iteration by iteration.

        If counts only order operators, the sum is asynchronous (paper, section 3.5), and the strategy uses it when the
        next window begins. A strategy that loses updates accounts for every token, so ranks wait for the sum.
        """
        for counts, wait in self._sums:
            wait()  # the reduction began a whole window ago
            self._add(counts, is_extra=False)
        self._sums.clear()
        for counter in self._counters:
            counts = counter.by_operator(self._pending[counter])
            is_accounted = isinstance(self.strategy, LosesUpdates)
            if is_accounted:  # after a failure, ranks may have different numbers of rows
                counts = counts.sum(dim=0, keepdim=True)
            counts, stage_group = counts.contiguous(), self.topology.channels.stage_group
            self._pending[counter].clear()
            if not is_accounted:
                self._sums.append((counts, stage_group.reduce_later(counts, Reduction.SUM)))
                continue
            stage_group.reduce(counts, Reduction.SUM)
            self._add(counts, is_extra=counter is self._room)

    def _add(self, counts: torch.Tensor, *, is_extra: bool) -> None:
        """Pass token counts of the stage to the strategy.

        Args:
            counts: tokens of each operator, summed over the stage, ``[iterations, operators]``.
            is_extra: True if they are only the tokens that extra capacity has admitted.
        """
        for row in counts.numpy():
            if is_extra and isinstance(self.strategy, BoostsExperts):
                self.strategy.observe_extra_tokens(np.asarray(row))
            elif isinstance(self.strategy, CountsTokens):
                self.strategy.observe(np.asarray(row))

    def _needed(self, schedules: Sequence[Schedule], checkpointer: Checkpointer) -> list[list[Total]]:
        """Return, for each of ``schedules``, the host memory that every rank would need. Collective.

        Without a cap on memory the lists are empty on all ranks, because all ranks have the same flags.
        """
        if math.isinf(self.allowed.nbytes):
            return [[] for _ in schedules]
        per_rank = all_gather_objects([self._needs(schedule, checkpointer) for schedule in schedules], list[Needs])
        keeps_own_copies = checkpointer.memory.keeps_own_copies
        return [
            totals(needs, self.topology.kept_bytes, keeps_own_copies=keeps_own_copies)
            for needs in zip(*per_rank, strict=True)
        ]

    def _needs(self, schedule: Schedule, checkpointer: Checkpointer) -> Needs:
        """Return the host memory that this rank needs if ``schedule`` follows the current schedule.

        The result includes the memory of the current schedule, which is not freed by then.
        """
        memory, changes = checkpointer.memory, [checkpointer.history.newest, schedule]
        here = max(checkpointer.own.arena.nbytes, memory.here(changes))
        nbytes = max(checkpointer.room.asked_bytes, memory.at_peer(changes))
        at_peer = AtPeer(nbytes, *memory.slots_at_peer(schedule), memory.staging)
        return Needs(
            snapshots=here, in_flight=here, at_peer=at_peer, log=self.log_bytes(schedule), allowed=self.allowed
        )

    def _measured_windows(
        self, now: Schedule, boundary: int, checkpointer: Checkpointer, senders: Sequence[Sender]
    ) -> tuple[int, ...] | None:
        """Return the window sizes that the strategy wants according to the measurements.

        A strategy may want several sizes, such as W and the period. For each of them, the result is the largest
        value of any rank.

        Returns:
            None if no rank has measurements.
        """
        cost = self._cost_of_all(sum(checkpointer.memory.slots_here(now)) / now.size)
        iteration_s, delay_s = self._measured_delay()
        own: Sequence[int] = ()
        if iteration_s > 0:
            d2h, network = self._measured_bandwidths(now, checkpointer, senders, iteration_s)
            measured = Measured(
                iteration_s, d2h_bytes_per_s=d2h, replication_bytes_per_s=network * NETWORK_HEADROOM,
                replicas=len(self.topology.peers[self.topology.rank]), disk_bytes_per_s=checkpointer.disk_bytes_per_s,
                delay_s=delay_s, logged_bytes=self._sent_bytes, cost=cost,
                shortened=2 * max(0.0, now.rollback(0).mean - SHORTEST_ROLLBACK),
                failures_every=self._failures_every(boundary),
            )  # fmt: skip
            if cost is not None:
                self.worth = measured.worth
            own = self.strategy.wanted_sizes(now, measured)
        most = MOST_PERIOD if self.strategy.sizes_are_iterations else NOT_CARRIED
        sizes = torch.full((MOST_SIZES,), NOTHING_MEASURED)
        sizes[: len(own)] = torch.tensor([min(size, most) if size < NOT_CARRIED else size for size in own])
        self.topology.channels.job_group.reduce(sizes, Reduction.MAX)
        agreed = tuple(size for size in sizes.tolist() if size != NOTHING_MEASURED)
        return agreed or None

    def _failures_every(self, committed: int) -> float:
        """Return the mean iterations between failures of the job; infinite if the cap on overhead always holds."""
        if self._default_cap is None or not self.failures:
            return math.inf
        return (committed - self._began_at) / self.failures

    def _cost_of_all(self, saved_bytes: float) -> Evidence | None:
        """Return the cost of saving in the job; None if it is not known. Collective.

        Args:
            saved_bytes: mean bytes that this rank saves in an iteration at present.
        """
        sums = torch.tensor(self._cost.report(self._meter.evidence(), saved_bytes), dtype=torch.float64)
        self.topology.channels.job_group.reduce(sums, Reduction.SUM)
        return self._cost.learn(sums.tolist(), has_failed=self.failures > 0)

    def _measured_delay(self) -> tuple[float, float]:
        """Return the seconds of an iteration without saving, and the seconds of delay that saving has caused.

        The delay counts from the last decision. Both numbers are 0.0 before enough iterations were measured. If saving
        ran in all iterations, the first number is the median of all iterations.
        """
        steps = self._steps
        if not steps:
            return 0.0, 0.0
        quiet = [step.train_s for step in steps if not step.is_saving]
        iteration_s = self._meter.quiet_s or statistics.median(quiet or [step.train_s for step in steps])
        saving = [step for step in self._steps[self._decided_at :] if step.is_saving]
        return iteration_s, max(0.0, sum(step.train_s + step.stall_s - iteration_s for step in saving))

    def _measured_bandwidths(
        self, now: Schedule, checkpointer: Checkpointer, senders: Sequence[Sender], iteration_s: float
    ) -> tuple[float, float]:
        """Return the bytes per second of copies from the device, and of the links to all peers together."""
        slots, _ = checkpointer.memory.slots_at_peer(now)
        # Snapshots may use only a share of the link rate. If the link has the rate ``needed``, this share suffices.
        needed = sum(slots) / now.size * len(senders) / iteration_s / NETWORK_HEADROOM
        rate = self._link_rate.take(senders, needed)
        network = self._budget.network_bytes_per_s or rate
        return self._budget.d2h_bytes_per_s or checkpointer.capturer.copy_rate(), network
