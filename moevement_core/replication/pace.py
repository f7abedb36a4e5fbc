"""Sends copies while training leaves the network alone (GEMINI, section 5), in chunks that fit into what is left.

In the first iterations beside which nothing is saved the counters of the network are read every millisecond or so. From
then on it is known when in an iteration training communicates. A copy that is behind (the next one waits already) goes
out at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from moevement_core import log
from moevement_core.policy.idle import IdleSpans, Sample, idle_spans

PROFILED = 8
"""Iterations."""
PATIENCE = 100
"""Iterations in which so many have to come; where copies never end, none does, and they are sent at once."""
LOOK_S = 0.001
"""Between two looks at the counters."""
STEP_S = 0.01
"""At most, between two looks at whether a copy that waits has to hurry."""
FIRST_CHUNK = 1 << 20
SMALLEST_CHUNK = 64 << 10
LARGEST_CHUNK = 64 << 20
"""Bytes."""


class Pace:
    """Of one rank in one process.

    Args:
        moved: gives the bytes that went over the network so far.
    """

    def __init__(self, moved: Callable[[], int]) -> None:
        self.spans = IdleSpans()
        self._moved = moved
        self._began_s = time.perf_counter()
        self._seen: list[tuple[float, list[Sample]]] = []
        self._samples: list[Sample] = []
        self._begun = 0
        self._looks = threading.Event()
        self._is_over = False
        self._rate = 0.0
        """Bytes per second of what was sent lately; 0 before anything was."""
        threading.Thread(target=self._look, name="moevement-pace", daemon=True).start()

    def begin(self, *, was_quiet: bool) -> None:
        """An iteration begins.

        Args:
            was_quiet: whether nothing was saved beside the one before, from its beginning to its end.
        """
        now, its = time.perf_counter(), self._samples
        self._begun += 1
        if was_quiet and self._looks.is_set():
            self._seen.append((now - self._began_s, its))
        self._began_s, self._samples = now, []
        if self._begun > PATIENCE and not self._is_over:
            self._is_over = True
        elif len(self._seen) < PROFILED:
            self._looks.set()
        elif not self._is_over:
            self.spans, self._is_over = idle_spans(self._seen), True
            self._seen.clear()
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
        """Whether it is known when training communicates."""
        return self._is_over

    def _look(self) -> None:
        last_s, last = time.perf_counter(), 0
        while not self._is_over:
            if not self._looks.wait(timeout=1.0):
                continue
            moved, now_s = self._moved(), time.perf_counter()
            began_s, samples = self._began_s, self._samples
            if last_s > began_s and last:
                samples.append(Sample(now_s - began_s, now_s - last_s, moved - last))
            last_s, last = now_s, moved
            time.sleep(LOOK_S)
