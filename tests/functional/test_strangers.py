"""Job beside an unauthenticated peer that reaches every socket but lacks the token; ``tests/fuzz`` runs more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moevement_core.run.run_record import RunRecord
from tests.fuzz.job import KILLS, attack, job_words
from tests.launching import finished, launch


@pytest.mark.builds
def test_a_job_ends_as_if_the_stranger_had_not_been_there(tmp_path: Path) -> None:
    code, out, err = finished(launch(*job_words(tmp_path / "undisturbed")))
    assert code == 0, f"{out}\n{err}"
    wanted = RunRecord(tmp_path / "undisturbed").summary()["state_digest"]["all"]
    attacked = attack(tmp_path / "attacked", seed=1)
    assert attacked.stranger.failure == ""
    assert attacked.code == 0, attacked.output[-4000:]
    assert attacked.record.summary()["state_digest"]["all"] == wanted
    failures = [event for event in attacked.record.events() if event["event"] == "failure"]
    assert len(failures) == len(KILLS), ("not the deaths that there were, and no other ones", failures)
    done = attacked.stranger.done
    assert sum(count for kind, count in done.items() if kind.startswith("relay")) > 20
    assert sum(count for kind, count in done.items() if kind.startswith("socket")) > 20
    assert sum(count for kind, count in done.items() if not kind.startswith(("socket", "relay"))) > 100
    assert len(attacked.stranger.seen) >= 3, "the store and each rank listen"
    assert {host for host, _ in attacked.stranger.seen} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert json.loads((attacked.record.folder / "refused_connections.json").read_text())["connections"] > 0
    # Neither files nor output, which others could read, contain the token.
    texts = [path.read_text(errors="replace") for path in attacked.record.folder.rglob("*") if path.is_file()]
    assert not any("MOEVEMENT_JOB_TOKEN" in text for text in [*texts, attacked.output])
