"""Benchmarks of the policy and of the kernels still run; these tests do not judge their figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from benchmarks import policy, reconfigure, reorders
from benchmarks.kernels.__main__ import Row, report
from benchmarks.kernels.layers import MODELS, counts_of, layer_of
from benchmarks.papers import ablation
from moevement_core.policy.window import WindowKind
from tests.training import ROOT


def test_the_policy_benchmark_measures() -> None:
    row = policy.measure(200, WindowKind.ROLLING, slots=3, repeats=2)
    assert row.startswith("| 200 | rolling |")
    assert "| order |" in policy.report([row], 2)


def test_the_table_of_connections_has_medians_in_milliseconds() -> None:
    seconds = {"_makes_anew": [0.1, 0.3, 0.2], "_reconfigures": [0.05, 0.04, 0.06]}
    lines = reconfigure.report(seconds, 13, survives=False).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines if line.endswith(" | 3 |")]
    assert cells == [["200", "100", "300", "3"], ["50", "40", "60", "3"]]


@pytest.mark.builds  # nine processes
@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "reconfigure"), reason="torch before 2.14 has no reconfigure")
def test_groups_are_reconfigured_with_a_new_process(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.reconfigure", "--turns", "2"]
    subprocess.run([*command, "--out", str(tmp_path / "page.md")], cwd=ROOT, check=True, timeout=300)
    assert reconfigure.SURVIVES in (tmp_path / "page.md").read_text()


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
    assert "| hard count" in table
    assert plot.stat().st_size > 0


def test_a_blind_order_freezes_half_and_an_oracle_the_most() -> None:
    table = reorders.table_of(1, 6)
    counts = np.array([1.0, 2, 3, 4, 5, 100])
    blind = np.mean([reorders.frozen_share(table, np.roll(np.arange(6), shift), counts) for shift in range(6)])
    assert blind == pytest.approx(0.5)
    assert reorders.frozen_share(table, np.arange(6), counts) == reorders.oracle(np.stack([counts, counts])[:, None])


def test_the_kernels_benchmark_knows_the_layers_and_writes_its_table() -> None:
    layers = [layer_of(model) for model in MODELS]
    assert [layer.experts for layer in layers] == [1, 4, 8, 8]
    for layer in layers:
        even, skewed = counts_of(layer, False), counts_of(layer, True)
        assert sum(even) == sum(skewed) == layer.tokens
        assert layer.experts == 1 or max(skewed) > 2 * min(skewed)
    layer = layers[-1]
    assert layer.product_flop == 2 * 65536 * 2048 * 1408 * 3
    table = report([Row(layer, "even", 4.0, 2.0, 1.5, None, 1.0)], 800.0, [], {"pack": 3000.0}, "a GPU")
    times = "4.000 | 2.000 | 1.500 |  | 1.000 | 2.67 | 756 | 94%"
    assert f"| deepseek_moe, 8 experts, 65536 tokens | even | {times} |" in table
    assert "| deepseek_moe | 638 MB | 369 MB |" in table
    assert "popularity" in report([], 1.0, ["popularity"], {}, "a GPU")


def test_the_ablation_compares_recoveries_that_lack_one_technique() -> None:
    def failure(at: float, replay_s: float, ranks: list[int]) -> dict[str, Any]:
        recovery = {"until": 9, "ranks": ranks, "replay_s": replay_s, "replayed": 6}
        return {"event": "failure", "failed_at": at, "recovery": recovery}

    metrics = [
        {"iteration": 9, "time": 100.0, "iteration_s": 1.0},
        {"iteration": 10, "time": 118.0, "iteration_s": 1.0},
    ]
    alone = ablation.result_of(ablation.WAYS[0], 1, [failure(108.0, 4.0, [2])], metrics)
    assert alone == ablation.Result(lost_s=9.0, replay_s=4.0, iteration_s=1.0, replayed=6, kills=1)
    results = {way.name: alone for way in ablation.WAYS}
    way = ablation.WAYS[2]
    results[way.name] = ablation.result_of(way, 1, [failure(108.0, 6.0, [0, 1, 2, 3])], metrics)
    assert f"| {way.name} | 9.00 | 6.00 | 1.50 | 6 | 1.00 | 1 |" in ablation.report(results)
    with pytest.raises(ablation.AblationError, match=rf"\b{way.name}\b.*\[1\].*\b4\b"):
        ablation.result_of(way, 1, [failure(108.0, 6.0, [2])], metrics)


def test_every_job_of_the_ablation_has_the_same_kills() -> None:
    kills = [
        [word for word in ablation.words(way, 3) if word.startswith("rank=")] for way in ablation.WAYS
    ]  # fmt: skip
    assert all(words == kills[0] for words in kills)
    assert len(kills[0]) == 3
