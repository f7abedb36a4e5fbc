"""Simulated strategies that save the whole state at once (synchronous, to peers, CheckFreq, Gemini) or save nothing."""

from __future__ import annotations

import math
from collections.abc import Collection

from moevement_core.errors import ConfigError
from moevement_core.planning.dense_plan import DENSE_OVERHEAD
from moevement_core.simulator.costs.costs import Costs
from moevement_core.simulator.costs.strategy_cost import StrategyCost


class NoCheckpointsCost(StrategyCost):
    """Strategy that saves nothing: the job starts from the beginning after every failure."""

    name = "none"
    in_memory = False
    overhead_s = 0.0
    interval = 0
    arrival = 0.0
    fetch_s = 0.0
    copied_bytes = 0.0
    host_bytes = 0.0
    expected_rollback = math.inf

    def rollback(self, committed: int, into: float) -> int:
        """Return ``committed``, because the job repeats all committed iterations."""
        return committed


class DenseCost(StrategyCost):
    """Strategy that saves the whole state every ``interval`` iterations. After a failure, every stage rolls back.

    Args:
        costs: costs of the job.
        interval: iterations from one checkpoint to the next.
        stall_s: seconds for which training waits for one checkpoint.
        arrival: iterations from the start of a checkpoint until peers or storage have all of it.
        fetch_s: seconds to load the whole state of a rank back to its device.
        in_memory: True if peers keep checkpoints; False if storage keeps them, and host memory is only a buffer.
    """

    name = "dense-interval"

    def __init__(
        self, costs: Costs, interval: int, stall_s: float, arrival: float, fetch_s: float, *, in_memory: bool = False
    ) -> None:
        super().__init__(costs)
        if interval < 1:
            raise ConfigError(f"a checkpoint every {interval} iterations; the interval has to be 1 or more")
        self._interval, self._stall_s, self._arrival, self._fetch_s = interval, stall_s, arrival, fetch_s
        self.in_memory = in_memory

    @property
    def overhead_s(self) -> float:
        """Mean seconds that checkpoints add to an iteration: waits for copies, and slower training during copies."""
        return self._stall_s / self._interval + self.costs.slowed_s(self.copied_bytes, self.sent_bytes)

    @property
    def interval(self) -> int:
        """Number of iterations from one checkpoint to the next."""
        return self._interval

    @property
    def arrival(self) -> float:
        """Iterations from the start of a checkpoint until peers or storage have all of it."""
        return self._arrival

    @property
    def fetch_s(self) -> float:
        """Seconds to load the whole state of a rank back to its device."""
        return self._fetch_s

    @property
    def _local_fetch_s(self) -> float:
        """Seconds to load the whole state of a rank if its own host's memory survives.

        If checkpoints are in storage, the rank reads them from there all the same.
        """
        return self.costs.copy_s(self.costs.full_bytes) if self.in_memory else self._fetch_s

    @property
    def copied_bytes(self) -> float:
        """Mean bytes that the heaviest rank copies to its host in an iteration: its state, divided by the interval."""
        return self.costs.full_bytes / self._interval

    @property
    def sent_bytes(self) -> float:
        """Mean bytes that the heaviest rank sends to each peer in an iteration; 0 if checkpoints go to storage."""
        return self.copied_bytes if self.in_memory else 0.0

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory of a rank: two buffers for its own checkpoints, and two for each rank whose peer it is.

        One of the two buffers holds the newest complete checkpoint while the other is filled with the next one.
        """
        return 2.0 * self.costs.full_bytes * (1 + (self.costs.plan.inputs.replicas if self.in_memory else 0))


class DenseSynchronousCost(DenseCost):
    """Strategy that stops training while it writes the whole state to storage.

    By default, the interval between checkpoints comes from the formula of Young and Daly.
    """

    name = "dense"

    def __init__(self, costs: Costs, mtbf_s: float, interval: int | None = None) -> None:
        write_s = costs.copy_s(costs.full_bytes) + costs.store_s()
        super().__init__(
            costs,
            interval=interval or young_daly(costs, write_s, mtbf_s),
            stall_s=write_s,
            arrival=0,
            fetch_s=costs.store_s(),
        )


def sent_dense(costs: Costs, hidden: int) -> tuple[float, float, float]:
    """Return the costs of a dense checkpoint at peers: seconds for which training waits, arrival, seconds of a fetch.

    The arrival is the time until peers have the whole checkpoint, in iterations.

    Args:
        costs: costs of the job.
        hidden: number of iterations during which training continues while the checkpoint is copied and sent. After
            them, training waits until the transfer ends.
    """
    busy_s = max(costs.copy_s(costs.full_bytes), costs.send_s(costs.full_bytes))
    fetch_s = costs.plan.inputs.cluster.fetch_s(costs.full_bytes)
    return max(0.0, busy_s - hidden * costs.iteration_s), busy_s / costs.iteration_s, fetch_s


class DenseToPeersCost(DenseCost):
    """Strategy that keeps the whole state in the memory of peers. Only stages that lost state roll back and replay.

    They replay from boundary logs.
    """

    name = "dense-to-peers"

    def __init__(self, costs: Costs, interval: int) -> None:
        stall_s, arrival, fetch_s = sent_dense(costs, interval)
        super().__init__(costs, interval, stall_s=stall_s, arrival=arrival, fetch_s=fetch_s, in_memory=True)

    def replay_iteration_s(self, nodes: Collection[int]) -> float:
        """Return the seconds of a replayed iteration, on the slowest group of stages that replay together.

        A group of one stage has no pipeline bubble.
        """
        return max(self.costs.time.segment_s(segment) for segment in self.costs.placement.segments(nodes))


class CheckFreqCost(DenseCost):
    """Strategy that copies the whole state to the host while the next iteration runs, and then writes it to storage.

    With the default interval, checkpoints cost at most 3% of training time, which is CheckFreq's cap.
    """

    name = "checkfreq"

    def __init__(self, costs: Costs, interval: int | None = None) -> None:
        copy_s, write_s = costs.copy_s(costs.full_bytes), costs.store_s()
        stall_s = max(0.0, copy_s - costs.iteration_s)
        delay_s = stall_s + costs.interference * copy_s
        hidden = math.ceil(delay_s / (DENSE_OVERHEAD * costs.iteration_s))
        interval = interval or max(1, hidden, costs.iterations(max(copy_s, write_s)))
        super().__init__(
            costs, interval, stall_s=stall_s, arrival=(copy_s + write_s) / costs.iteration_s, fetch_s=write_s
        )


class GeminiCost(DenseCost):
    """Strategy that keeps the whole state in the memory of peers. After a failure, all stages roll back.

    Copies and sends of a checkpoint are spread over all iterations until the next checkpoint, as in the live strategy.
    With ``is_spread=False`` only one iteration hides them, and training waits for the rest. The paper on MoEvement
    measured GEMINI like this.

    Args:
        costs: costs of the job.
        mtbf_s: mean seconds between failures of the job.
        is_oracle: True for the interval with the best ETTR by the formula of MoEvement, section 2.4; False for the
            interval by the formula of Young and Daly. It has no effect if ``interval`` is given.
        interval: iterations from one checkpoint to the next; None to choose the interval as ``is_oracle`` says.
        is_spread: True if copies and sends are spread over the whole interval.
    """

    name = "gemini"

    def __init__(
        self,
        costs: Costs,
        mtbf_s: float,
        *,
        is_oracle: bool = True,
        interval: int | None = None,
        is_spread: bool = True,
    ) -> None:
        if interval is None and is_oracle:
            interval = _best_interval(costs, mtbf_s, is_spread)
        elif interval is None:
            interval = young_daly(costs, sent_dense(costs, 1)[0], mtbf_s)
        stall_s, arrival, fetch_s = sent_dense(costs, interval if is_spread else 1)
        super().__init__(costs, interval, stall_s=stall_s, arrival=arrival, fetch_s=fetch_s, in_memory=True)
        if not is_spread:
            self.name = "gemini-stalling"
        elif not is_oracle:
            self.name = "gemini-young-daly"


def _best_interval(costs: Costs, mtbf_s: float, is_spread: bool) -> int:
    """Return the interval, in iterations, with the best ETTR of :class:`GeminiCost` by the formula of MoEvement."""
    delay_s = sent_dense(costs, 1)[0] + costs.slowed_s(costs.full_bytes, costs.full_bytes)
    longest = max(2, int(4 * math.sqrt(2 * max(delay_s, 1e-3) * mtbf_s) / costs.iteration_s))
    return max(
        range(1, longest + 1),
        key=lambda interval: GeminiCost(costs, mtbf_s, interval=interval, is_spread=is_spread).analytic_ettr(mtbf_s),
    )


def young_daly(costs: Costs, write_s: float, mtbf_s: float) -> int:
    """Return the interval of Young and Daly, ``sqrt(2 C MTBF)``, in iterations; C is ``write_s``, MTBF ``mtbf_s``."""
    return max(1, round(math.sqrt(2 * write_s * mtbf_s) / costs.iteration_s))
