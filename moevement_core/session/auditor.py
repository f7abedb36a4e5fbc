"""Audits of one rank: silent corruption is found, and the job goes back to a state from before it.

An audited stage keeps a copy of its state before an iteration, and trains. After the iteration it loads the copy and
executes the iteration again, from its own batches and from the boundary logs of other stages. A difference between both
executions means that a device has computed or stored something wrong. So an audit costs the stage about one iteration
and two copies of its state, and the other stages wait. No rank sends more than some hundred bytes.

After the last snapshot of each window, data-parallel replicas also compare their weights. That finds a wrong weight of
any iteration of the window, while the window before is still in memory.
"""

from __future__ import annotations

import time
from typing import Any, NoReturn

from moevement_core.audit.at_rest import StateAtRest
from moevement_core.audit.config import AUDIT_INTERVAL, AuditConfig
from moevement_core.audit.corruption import Corrupter
from moevement_core.audit.evidence import Computed, Difference
from moevement_core.audit.replicas import compact
from moevement_core.audit.verdict import AuditVerdict, Finding, judge, judge_replicas
from moevement_core.comms.codec import decode, encode
from moevement_core.errors import CorruptionFound
from moevement_core.policy.schedule import decided_at
from moevement_core.recovery.agree import Distrust
from moevement_core.recovery.scope import segments
from moevement_core.restart.faults import Corruption
from moevement_core.restart.generation import Regroup, atomic, generation, waiting_for_others
from moevement_core.run.events import Corrupted
from moevement_core.saving.saving import Saving
from moevement_core.saving.step_records import StepRecords
from moevement_core.session.recoverer import Recoverer
from moevement_core.session.second_execution import AuditedIteration, SecondExecution
from moevement_core.speed.waits import waits
from moevement_core.strategies.capabilities import LosesUpdates
from moevement_core.topology.topology import Topology
from moevement_core.trainer.capabilities import SupportsAudit, iterations_left_out, replica_digests, tie_of_stages
from moevement_core.trainer.commit import Commit, Mark
from moevement_core.util.words import counted

MOST_WAIT_S = 10.0
"""Longest time in seconds for which a rank waits until those with wrong results have given their ranks back."""


class Auditor:
    """Auditor of one rank. The training thread calls all methods.

    Args:
        config: interval of audits.
        corruptions: corruptions to inject, for drills.
        saving: saving of this rank's snapshots.
        records: outcomes of recent steps of this rank.
        commit: commit point of this rank.
        recoverer: recoverer of this rank.
    """

    def __init__(
        self,
        config: AuditConfig,
        corruptions: tuple[Corruption, ...],
        saving: Saving,
        records: StepRecords,
        commit: Commit,
        recoverer: Recoverer,
    ) -> None:
        self.distrust: tuple[Distrust, Mark | None] | None = None
        """Iterations that are not trusted any more, and the mark of the newest one that is; None if all are trusted.

        The mark is None if the job has to start over.
        """
        self._wrong = ""
        """Description of this rank's wrong results, until it has given its rank back; empty without any."""
        self._is_certain = False
        """True if no other rank may have computed these wrong results."""
        self._config, self._saving, self._commit, self._binding = config, saving, commit, saving.parts.binding
        model = None
        if (config.interval is not None or corruptions) and isinstance(self._binding, SupportsAudit):
            model = self._binding.audited()
        self._corrupter = Corrupter(corruptions, saving.topology.rank, saving.parts.states, model)
        self.executions = SecondExecution(
            saving, records, commit=commit, recoverer=recoverer, corrupter=self._corrupter, model=model
        )
        self._at_rest = StateAtRest(saving.parts.states) if config.memory else None
        self._before: Mark | None = None
        """State before the iteration in which :attr:`_at_rest` watches this rank's state; None without one."""
        self._clean_at: int | None = None
        """Newest iteration whose audit has found this rank's stage clean."""
        self._alike: Mark | None = None
        """Mark of the newest iteration after which all replicas had equal weights."""
        self._seconds = 0.0
        """Seconds that audits have taken since the last call of :meth:`fields`."""
        self._lacks_memory = False

    def fields(self) -> dict[str, Any]:
        """Return the fields of a metrics line: seconds of audits in the iteration, and the newest clean iteration."""
        seconds, self._seconds = self._seconds, 0.0
        return {"audit_s": seconds, "audited": self._clean_at}

    def interrupted(self) -> None:
        """Drop an audit that a failure has interrupted."""
        self.executions.interrupted()
        if self._at_rest is not None:
            self._at_rest.end()
        self._before = None

    def leave_if_wrong(self) -> None:
        """Give the rank back if a failure has prevented that after the verdict on this rank's results."""
        if self._wrong and (now := generation()) is not None:
            now.give_back(self._wrong, self._is_certain)

    def resumed(self, committed: int) -> None:
        """Trust all iterations again, because the job has gone back to ``committed``, a state that is trusted."""
        self.distrust = self.executions.unfinished = None
        self._alike = self._commit.mark  # the recovery has just compared replicas
        if self._clean_at is not None:
            self._clean_at = min(self._clean_at, committed)

    # Before an iteration

    def check(self, committed: int) -> None:
        """End the audit of ``committed``, and compare replicas if a window has ended. Every rank calls it.

        Called while ``state@committed`` is live, before its snapshot is captured.

        Raises:
            CorruptionFound: a result was wrong, and the job has no launcher that could replace the rank.
            Exception: a result was wrong; the exception leads to the next generation.
        """
        if not self._config.is_on:
            return
        began = time.perf_counter()
        with waiting_for_others(), waits.waiting():
            before, self._before = self._before, None
            audited = self.executions.take(committed)
            if self._at_rest is not None and before is not None and before.iteration == committed - 1:
                self._compare_memory(committed, before, self._at_rest)
            if audited is not None:
                self._end_audit(audited)
            if self._config.interval is not None and self._has_window_ended(committed):
                self._compare_replicas(committed)
        self._seconds += time.perf_counter() - began

    def begin(self, committed: int) -> None:
        """Begin the audit of the iteration after ``committed`` if it is due, and inject corruptions. Collective."""
        iteration, topology = committed + 1, self._saving.topology
        began = time.perf_counter()
        stage = self._config.stage_of(iteration, topology.pipeline.stages)
        if stage is not None and iteration not in iterations_left_out(self._binding):
            with waiting_for_others(), waits.waiting():
                self._begin_audit(iteration, self._segment(stage))
            self._seconds += time.perf_counter() - began
            began = time.perf_counter()
        if self._at_rest is not None:
            self._before = self._commit.mark
            self._at_rest.begin()
            self._seconds += time.perf_counter() - began
        self._corrupter.begin(iteration)
        self.executions.observe()

    def _segment(self, stage: int) -> frozenset[int]:
        """Return the stages that execute an iteration again if ``stage`` does, as in a recovery."""
        pipeline, binding = self._saving.topology.pipeline, self._binding
        if binding.boundary_log is None or tie_of_stages(binding) is not None:
            return frozenset(range(pipeline.stages))
        return segments(pipeline, {stage})[0]

    def _begin_audit(self, iteration: int, segment: frozenset[int]) -> None:
        mark, topology = self._commit.mark, self._saving.topology
        assert mark is not None
        can_copy = topology.stage not in segment or self._saving.has_room_for_state()
        answers = topology.channels.job_group.decide(
            encode(can_copy), lambda all_of: encode(all(decode(answer, bool) for answer in all_of))
        )
        if not decode(answers, bool):
            if not self._lacks_memory:
                self._saving.reports.log_once(
                    f"{AUDIT_INTERVAL}: a rank has no host memory for a copy of its state, so stages "
                    f"{sorted(segment)} are not audited; give --moevement-host-memory-gb more, or leave the flag out"
                )
            self._lacks_memory = True
            return
        self.executions.begin(iteration, segment, mark)

    # After an iteration

    def _end_audit(self, audited: AuditedIteration) -> None:
        stage = self._saving.topology.stage
        difference = self.executions.compare(audited)
        verdict = self._decide(Finding(stage, self._clean_at, difference), is_of_replicas=False)
        if verdict.suspects:
            self._go_back(verdict, audited.iteration, audited.mark, Distrust(audited.iteration - 1, verdict.clean_at))
        if stage in audited.segment:
            self._clean_at = audited.iteration

    def _compare_memory(self, committed: int, before: Mark, at_rest: StateAtRest) -> None:
        """Find out whether the state of a rank changed in ``committed`` before the update. Collective."""
        operators = at_rest.end()
        difference = Difference(Computed.AT_REST, (0, 0), operators) if operators else None
        verdict = self._decide(Finding(self._saving.topology.stage, None, difference), is_of_replicas=False)
        if verdict.suspects:
            # The snapshot of the iteration before was copied while the state changed.
            self._go_back(verdict, committed, before, Distrust(committed - 1, committed - 2))

    def _has_window_ended(self, committed: int) -> bool:
        """Return True if the newest snapshot is the last one of its window; the result is the same on all ranks.

        A strategy that loses updates has no windows in this sense. Its ranks compare when they decide on snapshots.
        """
        history, last = self._saving.checkpointer.history, committed - 1
        if last < self._saving.began_at:
            return False
        if isinstance(self._saving.windows.strategy, LosesUpdates):
            return decided_at(history.at(committed), committed) == committed
        schedule = history.at(last)
        return schedule.slot(last) + 1 == schedule.snapshots

    def _compare_replicas(self, committed: int) -> None:
        topology = self._saving.topology
        finding = Finding(topology.stage, self._clean_at, replicas=tuple(compact(replica_digests(self._binding))))
        verdict = self._decide(finding, is_of_replicas=True)
        if verdict.suspects:
            alike, began_at = self._alike, self._saving.began_at
            trusted = began_at if alike is None else alike.iteration
            self._go_back(verdict, committed, alike, Distrust(trusted, trusted))
        self._alike = self._commit.mark

    def _decide(self, finding: Finding, *, is_of_replicas: bool) -> AuditVerdict:
        def decide(findings: list[bytes]) -> bytes:
            return encode((judge_replicas if is_of_replicas else judge)([decode(each, Finding) for each in findings]))

        group = self._saving.topology.channels.job_group
        verdict: AuditVerdict = decode(group.decide(encode(finding), decide), AuditVerdict)
        return verdict

    # After a wrong result

    def _go_back(self, verdict: AuditVerdict, found_at: int, mark: Mark | None, distrust: Distrust) -> NoReturn:
        """Give wrong ranks back, and leave the generation with the order to go back to a trusted state."""
        topology, now = self._saving.topology, generation()
        text = _text(verdict, found_at, topology)
        self.distrust = distrust, mark
        is_wrong = topology.rank in [suspect.rank for suspect in verdict.suspects]
        self._wrong, self._is_certain = text if is_wrong else "", len(verdict.suspects) == 1
        event = Corrupted(
            text, iteration=found_at, ranks=tuple(suspect.rank for suspect in verdict.suspects),
            nodes=tuple(topology.nodes[suspect.rank] for suspect in verdict.suspects),
            operators=tuple(sorted({name for suspect in verdict.suspects for name in suspect.operators})),
            trusted=distrust.trusted, clean_at=distrust.clean_at,
        )  # fmt: skip
        self._saving.reports.warn(text, event)
        if now is None:
            raise CorruptionFound(f"{text}. Its weights must not be used: start again from an older state")
        topology.channels.job_group.barrier()  # from here on, every rank knows that its state is not trusted
        if is_wrong:
            with atomic():
                now.give_back(text, self._is_certain)
        deadline = time.monotonic() + MOST_WAIT_S
        while time.monotonic() < deadline:  # the interruption by the guard is raised in this loop
            time.sleep(0.02)
        raise Regroup


def _text(verdict: AuditVerdict, found_at: int, topology: Topology) -> str:
    suspects = verdict.suspects[:5]
    wrong = "; ".join(
        f"rank {suspect.rank} on node {topology.nodes[suspect.rank]}: {suspect.text}"
        + (f" of {', '.join(suspect.operators[:5])}" if suspect.operators else "")
        for suspect in suspects
    )
    more = len(verdict.suspects) - len(suspects)
    return (
        f"silent corruption in or before iteration {found_at}: {wrong}"
        + (f", and {counted(more, 'more rank')}" if more else "")
    )  # fmt: skip
