"""A launcher ends after a signal that asks it to, also if a finalizer runs when the signal comes."""

from __future__ import annotations

import os
import signal

import pytest

from moevement_core.launching import signals as signals_module
from moevement_core.launching.signals import REPEAT_S, Signals, Stopped


class Interrupted:
    """Object whose finalizer runs when the signal comes."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # until the interpreter runs the handler
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_comes_in_a_finalizer_is_not_lost() -> None:
    with Signals() as signals:
        signals.check()
        interrupted = Interrupted()
        del interrupted  # Python drops an exception of a finalizer
        with pytest.raises(Stopped) as stopped:
            signals.check()
    assert stopped.value.number == signal.SIGINT


def test_the_first_request_may_be_to_end_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that all signals within a second are one request, and that a later signal ends the job at once."""
    now = 100.0
    monkeypatch.setattr(signals_module.time, "monotonic", lambda: now)
    with Signals() as signals:
        signals.may_wind_down = True
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
            signals.check()
        assert signals.asked_by == signal.SIGTERM
        now += REPEAT_S
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)
