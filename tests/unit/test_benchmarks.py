"""The benchmarks of the policy keep running; what they measure is not judged here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import policy, reorders
from moevement_core.policy.window import WindowKind


def test_the_policy_benchmark_measures() -> None:
    row = policy.measure(200, WindowKind.ROLLING, slots=3, repeats=2)
    assert row.startswith("| 200 | rolling |")
    assert "| order |" in policy.report([row], 2)


def test_a_routing_record_is_replayed_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(3)
    record = tmp_path / "routing.npz"
    tokens = generator.multinomial(4096, np.full(8, 1 / 8), size=(12, 2)).astype(np.int32)
    np.savez(record, tokens_per_expert=tokens, iteration=np.arange(1, 121, 10))
    output, plot = tmp_path / "table.md", tmp_path / "plot.png"
    monkeypatch.setattr("sys.argv", ["reorders", str(record), "--output", str(output), "--plot", str(plot)])
    reorders.main()
    table = output.read_text()
    assert "2 layers, 8 experts" in table
    assert "| hard count, over the run |" in table
    assert plot.stat().st_size > 0


def test_a_blind_order_freezes_half_and_an_oracle_the_most() -> None:
    table = reorders.table_of(1, 6)
    counts = np.array([1.0, 2, 3, 4, 5, 100])
    blind = np.mean([reorders.frozen_share(table, np.roll(np.arange(6), shift), counts) for shift in range(6)])
    assert blind == pytest.approx(0.5)
    assert reorders.frozen_share(table, np.arange(6), counts) == reorders.oracle(np.stack([counts, counts])[:, None])
