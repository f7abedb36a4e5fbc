"""Sends copies while training leaves the network alone (GEMINI, section 5), in chunks that fit into what is left.

In the first iterations beside which nothing is saved the counters of the network are read every millisecond or so. From
then on it is known when in an iteration training communicates. A copy that is behind (the next one waits already) goes
out at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from moevement_core import log
from moevement_core.policy.idle import IdleSpans, Sample, idle_spans

PROFILED = 8
"""Iterations."""
PATIENCE = 100
"""Iterations in which so many have to come; where copies never end, none does, and they are sent at once."""
LOOK_S = 0.001
"""Seconds between two readings of the counters."""
STEP_S = 0.01
"""Longest sleep while waiting for an idle span, in seconds."""
FIRST_CHUNK = 1 << 20
SMALLEST_CHUNK = 64 << 10
LARGEST_CHUNK = 64 << 20
"""Bytes."""


class Pace:
    """Pace of one rank in one process.

    Args:
        moved: gives the bytes that went over the network so far.
    """

    def __init__(self, moved: Callable[[], int]) -> None:
        self.spans = IdleSpans()
        self._moved = moved
        self._began_s = time.perf_counter()
        self._profile = Profile()
        self._begun = 0
        self._looks = threading.Event()
        self._is_over = False
        self._rate = 0.0
        """Bytes per second of what was sent lately; 0 before anything was."""
        threading.Thread(target=self._look, name="moevement-pace", daemon=True).start()

    def begin(self, *, was_quiet: bool) -> None:
        """Start the clock of an iteration.

        Args:
            was_quiet: whether nothing was saved beside the one before, from its beginning to its end.
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
                f"{len(self.spans.spans)} spans; copies are sent there"
            )

    def allowed(self, nbytes: int, must_hurry: Callable[[], bool]) -> int:
        """Wait until something may be sent.

        Args:
            nbytes: that are to be sent.
            must_hurry: asked now and then; if so, all of them may be.

        Returns:
            How many of them may be sent now.
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
        """A copy has arrived: so much was sent in so long, without waits."""
        self._rate = nbytes / max(seconds, 1e-6)

    @property
    def is_known(self) -> bool:
        """True if it is known when training communicates."""
        return self._is_over

    def _look(self) -> None:
        self._looks.wait()
        while not self._is_over:
            moved = self._moved()
            self._profile.look(time.perf_counter(), moved)
            time.sleep(LOOK_S)


class Profile:
    """Network traffic in some iterations, by counters that any thread may read from time to time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._iterations: list[tuple[float, list[Sample]]] = []
        self._samples: list[Sample] = []
        self._began_s = self._last_s = time.perf_counter()
        self._last = 0

    def begin(self, now_s: float, moved: int, *, is_counted: bool) -> Sequence[tuple[float, Sequence[Sample]]]:
        """An iteration begins now, so that nothing of it is unseen.

        Args:
            now_s: of a monotonic clock.
            moved: bytes that went over the network so far.
            is_counted: whether the iteration before belongs to the profile.

        Returns:
            The length of each iteration that does, and what was seen in it.
        """
        with self._lock:
            self._add(now_s, moved)
            if is_counted:
                self._iterations.append((now_s - self._began_s, self._samples))
            self._began_s, self._samples = now_s, []
            return self._iterations

    def look(self, now_s: float, moved: int) -> None:
        """Note that the counter stood at ``moved`` at ``now_s``; ignored if a later reading is there."""
        with self._lock:
            self._add(now_s, moved)

    def _add(self, now_s: float, moved: int) -> None:
        if now_s > self._last_s:
            self._samples.append(Sample(now_s - self._began_s, now_s - self._last_s, moved - self._last))
            self._last_s, self._last = now_s, moved
