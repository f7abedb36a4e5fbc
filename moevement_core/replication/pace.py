"""Timing of sends: senders send copies in idle spans of the network (GEMINI, section 5), in chunks that fit the spans.

In the first iterations without saving, a thread reads the network counters about every millisecond. The readings form a
profile, which shows when in an iteration training communicates. If the next copy is already in a sender's queue, the
present copy is late, and the sender no longer waits for idle spans.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from moevement_core import log
from moevement_core.policy.idle import IdleSpans, TrafficSample, idle_spans

PROFILED = 8
"""Number of iterations in a profile."""
PATIENCE = 100
"""Iterations after which profiling ends without a result. Senders then never wait for idle spans.

The profile needs iterations without saving, and a job that always has copies under way has none.
"""
LOOK_S = 0.001
"""Seconds between two readings of the network counters."""
STEP_S = 0.01
"""Longest sleep while waiting for an idle span, in seconds."""
FIRST_CHUNK = 1 << 20
SMALLEST_CHUNK = 64 << 10
LARGEST_CHUNK = 64 << 20
"""Most bytes of a chunk. The first copy goes out in chunks of ``FIRST_CHUNK`` bytes. Later chunks have
``SMALLEST_CHUNK`` to ``LARGEST_CHUNK`` bytes."""


class Pace:
    """Decision when the senders of a process may send. A thread of this object profiles the network.

    Args:
        moved: function that returns the bytes sent and received over the network so far.
    """

    def __init__(self, moved: Callable[[], int]) -> None:
        self.spans = IdleSpans()
        self._moved = moved
        self._began_s = time.perf_counter()
        self._profile = TrafficProfile()
        self._begun = 0
        self._looks = threading.Event()
        self._is_over = False
        self._rate = 0.0
        """Bytes per second at which the newest copy was sent; 0 before the first one."""
        threading.Thread(target=self._look, name="moevement-pace", daemon=True).start()

    def begin(self, *, was_quiet: bool) -> None:
        """Record that an iteration begins now.

        Args:
            was_quiet: True if nothing was saved during the whole previous iteration.
        """
        self._began_s = time.perf_counter()
        if self._is_over:
            return
        self._begun += 1
        seen = self._profile.begin(self._began_s, self._moved(), is_counted=was_quiet and self._looks.is_set())
        self._looks.set()
        if self._begun > PATIENCE:
            self._is_over = True
        elif len(seen) >= PROFILED:
            self.spans, self._is_over = idle_spans(seen), True
            log.info(
                f"the network is idle in {self.spans.idle_s:.3f} of {self.spans.iteration_s:.3f} s of an iteration, in "
                f"{len(self.spans.spans)} spans; copies are sent in these spans"
            )

    def allowed(self, nbytes: int, must_hurry: Callable[[], bool]) -> int:
        """Wait for an idle span; return the bytes that a sender may send now.

        Args:
            nbytes: bytes that are left to send.
            must_hurry: function that returns True if the sender need not wait for an idle span; called at least every
                :data:`STEP_S` seconds.

        Returns:
            Bytes that may be sent now, ``nbytes`` at most.
        """
        while not must_hurry():
            offset_s = time.perf_counter() - self._began_s
            if (wait_s := self.spans.wait_s(offset_s)) > 0:
                time.sleep(min(STEP_S, wait_s))
                continue
            left_s = self.spans.left_s(offset_s)
            fits = self._rate * min(left_s, STEP_S * 10) if self._rate else FIRST_CHUNK
            return min(nbytes, max(SMALLEST_CHUNK, min(LARGEST_CHUNK, int(fits))))
        return nbytes

    def sent(self, nbytes: int, seconds: float) -> None:
        """Record that a copy of ``nbytes`` bytes was sent and acknowledged in ``seconds``, waits excluded."""
        self._rate = nbytes / max(seconds, 1e-6)

    @property
    def is_known(self) -> bool:
        """True if the profile is complete, or profiling was given up."""
        return self._is_over

    def _look(self) -> None:
        self._looks.wait()
        while not self._is_over:
            moved = self._moved()
            self._profile.look(time.perf_counter(), moved)
            time.sleep(LOOK_S)


class TrafficProfile:
    """Profile of network traffic over some iterations. Any thread may add readings of the counters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._iterations: list[tuple[float, list[TrafficSample]]] = []
        self._samples: list[TrafficSample] = []
        self._began_s = self._last_s = time.perf_counter()
        self._last = 0

    def begin(self, now_s: float, moved: int, *, is_counted: bool) -> Sequence[tuple[float, Sequence[TrafficSample]]]:
        """Begin an iteration with a reading of the counters, so that the profile covers all of it.

        Args:
            now_s: time of the reading on a monotonic clock, in seconds.
            moved: bytes sent and received over the network so far.
            is_counted: True to add the iteration that ends now to the profile.

        Returns:
            Length in seconds and samples of each iteration in the profile.
        """
        with self._lock:
            self._add(now_s, moved)
            if is_counted:
                self._iterations.append((now_s - self._began_s, self._samples))
            self._began_s, self._samples = now_s, []
            return self._iterations

    def look(self, now_s: float, moved: int) -> None:
        """Add a reading: ``moved`` bytes at the time ``now_s``. A reading older than the newest one is ignored."""
        with self._lock:
            self._add(now_s, moved)

    def _add(self, now_s: float, moved: int) -> None:
        if now_s > self._last_s:
            self._samples.append(TrafficSample(now_s - self._began_s, now_s - self._last_s, moved - self._last))
            self._last_s, self._last = now_s, moved
