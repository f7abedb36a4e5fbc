"""Plans follow from shapes and bandwidths; the expected numbers are computed by hand for a small job."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.moevement.describe import describe
from moevement_cli.main import main
from moevement_cli.plan import PRESETS, config_path
from moevement_cli.simulate import SCENARIOS
from moevement_cli.units import seconds
from moevement_core.errors import ConfigError, WindowError
from moevement_core.operators import OperatorKind
from moevement_core.planning.alternatives import alternatives, bandwidth_for
from moevement_core.planning.checkpoint_plan import CheckpointPlan, PlanInput
from moevement_core.planning.cluster import CLUSTERS, Cluster
from moevement_core.planning.dense_plan import dense_plan
from moevement_core.planning.job import JobShape, OperatorShape, StageShape
from moevement_core.planning.planned_memory import PlannedMemory
from moevement_core.policy.window import WindowKind
from moevement_core.precision import MIXED, TensorShape, parse
from moevement_core.simulator.scenario import load
from moevement_core.snapshot.agreement import MOST_PERIOD
from tests.unit.models import TABLE_2, as_plain

# Stage 0 has eight experts of 1,000 parameters, stage 1 four and an embedding. Full 12 bytes, compute 2 bytes.
MATRICES = (TensorShape(600, 30), TensorShape(400, 20))
EXPERTS = tuple(OperatorShape(f"layers.0.experts.{e}", OperatorKind.EXPERT, MATRICES, 1) for e in range(8))
SMALL = JobShape(
    name="small", ranks=32, tensor_parallel=1, pipeline_parallel=2, expert_parallel=1, context_parallel=1,
    data_parallel=16, micro_batches=4, boundary_bytes=100, regime=MIXED,
    stages=(
        StageShape(EXPERTS, sends_per_micro_batch=1),
        StageShape((*EXPERTS[:4], OperatorShape("embedding", OperatorKind.EMBEDDING, (TensorShape(2000),), 2)), 1),
    ),
)  # fmt: skip
SLOW_NETWORK = Cluster(gpus_per_node=8, d2h_bytes_per_s=1e6, network_bytes_per_s=8 * 64_000)


def planned(**changes: Any) -> CheckpointPlan:
    values: dict[str, Any] = {"job": SMALL, "cluster": SLOW_NETWORK, "regime": MIXED, "iteration_s": 1.0} | changes
    return CheckpointPlan(PlanInput(**values))


def test_windows_become_rarer_until_copies_slow_training_by_the_cap_at_most() -> None:
    usual = planned(replicas=1)
    assert (usual.period, usual.stages[0].schedule.rest) == (usual.size, 0)
    window_bytes = max(int(stage.window.slot_bytes[0].sum()) for stage in usual.stages)
    # The link carries 64 kB/s. Training loses half of the time for which the link carries a window.
    lost_s = 0.5 * window_bytes / 64_000
    rarer = planned(replicas=1, contention=0.5, overhead_cap=0.01)
    assert rarer.period == math.ceil(lost_s / 0.01) > rarer.size == usual.size
    assert all(stage.schedule.size == rarer.period for stage in rarer.stages)
    assert rarer.expected_rollback > usual.expected_rollback
    assert planned(replicas=1, contention=0.5, period=40).period == 40


@pytest.mark.parametrize("period", [3, MOST_PERIOD + 1])
def test_a_period_that_no_live_job_has_is_refused(period: int) -> None:
    with pytest.raises(WindowError, match=rf"\bperiod {period}\b.*\b5\b.*\b{MOST_PERIOD}\b"):
        planned(period=period)


def test_a_slow_link_makes_windows_no_rarer_than_those_of_a_live_job() -> None:
    assert planned(contention=1e9).period == MOST_PERIOD


def test_the_window_of_the_job_is_that_of_the_stage_that_needs_the_largest() -> None:
    plan = planned()
    budget = plan.binding_stage.budget
    assert (budget.bytes, budget.binding, budget.d2h_bytes) == (32_000, "replication", 1e6 - 400)
    # Stage 0 has slots of 1, 1, 2, 2, 2 operators: two in the first slot would need 2 x 12 + 6 x 2 kB, over the budget.
    # Stage 1 has slots of 2, 2, 1 operators.
    assert [stage.own.size for stage in plan.stages] == [5, 3]
    assert (plan.size, plan.stages.index(plan.binding_stage)) == (5, 0)
    assert all(stage.window.size == 5 and not stage.window.over_budget for stage in plan.stages)
    assert plan.stages[0].window.slot_bytes[0].max() <= 32_000
    assert plan.stages[0].full_bytes == 96_000
    assert plan.stages[1].full_bytes == 4 * 12_000 + 12_000, "the embedding is cut over two ranks"


def test_time_memory_and_rollback_follow_from_the_window() -> None:
    plan = planned()
    slots = plan.stages[0].window.slot_bytes[0]
    assert plan.lag == 1
    assert plan.expected_rollback == 1.5 * 5 + 1
    assert plan.most_replayed == 2 * 5 - 1 + 1
    assert plan.stall_s == plan.behind_s == 0.0
    # Two windows and three more snapshots, of whichever slots are the largest.
    snapshots, replicas, logs = PlannedMemory(plan).of_rank
    assert snapshots == 2 * slots.sum() + max(np.roll(slots, n)[:3].sum() for n in range(5))
    assert logs == (2 * 5 + 3) * 4 * 100
    # Peers reserve memory only for the lag that a quiet iteration causes, not for all the lag that is allowed.
    assert replicas == 2 * (2 * slots.sum() + max(np.roll(slots, n)[:2].sum() for n in range(5)))
    assert PlannedMemory(plan).of_node == 8 * (snapshots + replicas + logs)


def test_of_windows_on_disk_one_more_is_kept_whole_on_each_rank() -> None:
    plan = planned(to_disk=True, keeps_own_copies=False)
    slots = plan.stages[0].window.slot_bytes[0]
    snapshots, _, logs = PlannedMemory(plan).of_rank
    assert snapshots == 3 * slots.sum() + max(np.roll(slots, n)[:3].sum() for n in range(5))
    assert logs == (3 * 5 + 3) * 4 * 100


def test_rolling_windows_roll_back_less_and_weigh_more() -> None:
    aligned, rolling = planned(), planned(kind=WindowKind.ROLLING)
    assert (
        rolling.size > aligned.size
        or rolling.stages[0].window.slot_bytes.sum() > aligned.stages[0].window.slot_bytes.sum()
    )
    assert rolling.most_replayed == rolling.size + rolling.lag


def test_from_the_bandwidth_named_for_a_window_on_that_window_suffices() -> None:
    plan = planned()
    for size in range(1, 7):
        rate = bandwidth_for(plan, size)
        enough = replace(SLOW_NETWORK, network_bytes_per_s=8 * 2 * rate * 1.0001)
        too_little = replace(SLOW_NETWORK, network_bytes_per_s=8 * 2 * rate * 0.97)
        assert planned(cluster=enough).size <= size
        assert planned(cluster=too_little).size > size


def test_an_imposed_window_says_what_it_stalls_and_by_how_much_it_falls_behind() -> None:
    slow = replace(SLOW_NETWORK, d2h_bytes_per_s=48_400.0)
    plan = planned(cluster=slow, window=1)
    assert plan.size == 1
    assert plan.stall_s == pytest.approx(96_400 / 48_400 - 1)
    assert plan.behind_s == pytest.approx(2 * 96_000 / 64_000 - 1)


def test_alternatives_name_what_would_change_the_window() -> None:
    changes = dict(alternatives(planned().inputs))

    def window_by(noun: str) -> int:
        (size,) = (size for change, size in changes.items() if noun in change)
        return size

    assert window_by("device") == 5
    assert window_by("network") == 2
    assert window_by("replica") == 2
    assert window_by("iterations") == 2
    assert window_by("FP8/FP8/FP8+FP16") == 2, "8 x 4,000 bytes would fit once; their scales do not"


def test_a_dense_checkpoint_of_the_same_model_stands_beside_it() -> None:
    dense = dense_plan(planned())
    assert (dense.bytes, dense.copy_s, dense.send_s, dense.stall_s) == (96_000, 0.096, 3.0, 0.0)
    assert (dense.interval, dense.expected_rollback, dense.average_replayed) == (3, 1.5 + 1 + 3, 1.0 + 1 + 3)
    # A rank keeps its persisted checkpoint and two more, because peers lag by three iterations; peers keep two.
    assert dense.host_memory == (3 * 96_000, 2 * 2 * 96_000, (4 * 3 + 3 + 1) * 400)
    assert dense_plan(planned(), 7).interval == 7
    slow = dense_plan(planned(cluster=replace(SLOW_NETWORK, d2h_bytes_per_s=48_000.0), replicas=0))
    assert (slow.stall_s, slow.interval) == (1.0, 34), "3% of an iteration of 1 s hides 1 s in 34 iterations"


def test_replicas_need_as_many_other_nodes() -> None:
    with pytest.raises(WindowError, match=r"\b4 replicas\b.*\b4 nodes\b.*\b3\b"):
        planned(replicas=4)


@pytest.mark.parametrize("name", sorted(set(TABLE_2) - {"laptop"}))
def test_described_presets_have_the_parameters_of_the_paper(name: str) -> None:
    ranks, total, _ = TABLE_2[name]
    shape = describe(name, ["--config", str(PRESETS / f"{name}.yaml")], ranks)
    tied = name == "gpt_moe"
    # The plan has one rank of each stage. Divided by the ranks that share them, its parameters add up to the model's.
    of_stages = (sum(o.parameters / o.shards for o in stage.operators) for stage in shape.stages)
    in_all = sum(of_stages) * ranks / shape.pipeline_parallel
    if tied:
        in_all -= 50304 * 2048
    assert in_all == pytest.approx(total, rel=0.03)
    by_numbers = load(SCENARIOS / f"{name}.yaml").job
    assert as_plain(by_numbers) == as_plain(shape), "what is simulated is what Megatron makes of the flags"


def test_flags_win_over_the_file_and_a_regime_follows_from_them() -> None:
    config = ["--config", str(PRESETS / "gpt_moe.yaml")]
    shape = describe("gpt", [*config, "--pipeline-model-parallel-size", "6"], 96)
    assert (shape.pipeline_parallel, len(shape.stages), shape.layout) == (6, 6, "PP6 EP8 DP16")
    assert [stage.sends_per_micro_batch for stage in shape.stages] == [1, 2, 2, 2, 2, 1]
    assert str(shape.regime) == "BF16/FP32/FP32+FP32"
    fp8 = ["--use-precision-aware-optimizer", "--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp16",
           "--main-params-dtype", "fp16", "--fp8-format", "hybrid", "--fp8-param-gather"]  # fmt: skip
    assert str(describe("gpt", [*config, *fp8], 96).regime) == "FP8/FP16/FP8+FP16"


def test_a_config_with_context_parallelism_or_another_dispatcher_is_described_without_a_gpu() -> None:
    config = ["--config", str(PRESETS / "qwen_moe.yaml")]
    plain = describe("qwen", config, 96)
    cut = describe("qwen", [*config, "--context-parallel-size", "2"], 96)
    assert (plain.data_parallel, cut.data_parallel, cut.context_parallel) == (16, 8, 2)
    assert cut.boundary_bytes == plain.boundary_bytes // 2
    assert cut.stages == plain.stages


def test_the_command_prints_tables_and_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "deepseek_moe", "--ranks", "96", "--iteration-time", "2.75", "--cluster", "moevement-a100",
               "--network-share", "1"]  # fmt: skip
    assert main([*command, "--global-batch-size", "512", "--json"]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert (result["window"], result["binding"], result["paper_window"], result["fits"]) == (2, "replication", 1, True)
    assert len(result["stages"]) == 12
    for stage in result["stages"]:
        assert sum(stage["slot_operators"]) == stage["operators"]
        assert len(stage["slot_bytes"]) == 2
    assert result["budget_bytes"] == pytest.approx(1.25e9 * 2.75 / 2)


ENOUGH = ["--ranks", "96", "--iteration-time", "2", "--cluster", "moevement-a100"]


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["gpt", *ENOUGH], r"'gpt'.*\bdeepseek_moe\b.*\bgpt_moe\b"),
        (
            ["gpt_moe", "--ranks", "96", "--iteration-time", "2"],
            r"--cluster\b.*--d2h-bandwidth\b.*--copy-bandwidth\b.*--gpus-per-node\b",
        ),
        (["gpt", "--ranks", "96", "--iteration-time", "2"], r"'gpt'.*\bgpt_moe\b"),
        (["gpt_moe", *ENOUGH, "--cluster", "h100"], r"--cluster h100\b.*\bmoevement-h100\b.*--copy-bandwidth\b"),
        (["gpt_moe", *ENOUGH, "--iteration-time", "1x"], r"--iteration-time\b.*'1x'.*\b1\.5h\b"),
        (
            ["gpt_moe", *ENOUGH, "--copy-bandwidth", "3", "--network-share", "0.5"],
            r"--copy-bandwidth 3\b.*--network-share 0\.5\b",
        ),
        (["gpt_moe", *ENOUGH, "--protection", "copies:2", "--replicas", "1"], r"--protection\b.*--replicas\b"),
        (["gpt_moe", *ENOUGH, "--iteration-time", "0"], r"--iteration-time 0\.0\b.*\b0\b"),
        (["gpt_moe", *ENOUGH, "--iteration-time", "nan"], r"--iteration-time nan\b"),
        (["gpt_moe", *ENOUGH, "--ranks", "0"], r"--ranks 0\b.*\b1\b"),
        (["gpt_moe", *ENOUGH, "--ranks", "7"], r"\b7\b.*--pipeline-model-parallel-size 3\b"),
        (["gpt_moe", *ENOUGH, "--window", "0"], r"--window 0\b.*\b1\b"),
        (["gpt_moe", *ENOUGH, "--regime", "fp4"], r"'fp4'.*\bmixed\b"),
        (["gpt_moe", *ENOUGH, "--network-share", "0"], r"\bnetwork share\b.*\b0\.0\b.*\b0\b.*\b1\b"),
        (["gpt_moe", *ENOUGH, "--d2h-bandwidth", "0"], r"\bdevice\b.*\b0\.0\b.*\b0\b"),
        (["gpt_moe", *ENOUGH, "--network-bandwidth", "0"], r"\bnetwork bandwidth\b.*\b0\.0\b.*\b0\b"),
        (["gpt_moe", *ENOUGH, "--replicas", "-1"], r"--replicas -1\b.*\b0\b"),
        (["gpt_moe", *ENOUGH, "--keep-own", "never", "--replicas", "1"], r"--keep-own never\b.*\b1\b.*\b2\b"),
        (["gpt_moe", *ENOUGH, "--gpus-per-node", "0"], r"\bGPUs\b.*\bnode\b.*\b0\b.*\b1\b"),
        (["gpt_moe", *ENOUGH, "--no-such-flag", "1"], r"--no-such-flag\b.*--help\b"),
        (["gpt_moe", "--num-layers", "13", *ENOUGH], r"\bMegatron\b.*\bpipeline-model-parallel\b"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_2(
    words: list[str], pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *words])
    assert exit_.value.code == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert re.search(pattern, errors[0]), errors[0]


@pytest.mark.parametrize("kind", list(WindowKind))
@pytest.mark.parametrize("replicas", [0, 1, 2, 3])
@pytest.mark.parametrize("network", [8_000.0, 512_000.0, 1e9])
def test_no_recovery_replays_more_on_average_than_at_most(kind: WindowKind, replicas: int, network: float) -> None:
    plan = planned(kind=kind, replicas=replicas, cluster=replace(SLOW_NETWORK, network_bytes_per_s=network))
    for variant in (plan, plan.redo(), dense_plan(plan), dense_plan(plan, 12)):
        assert 0 <= variant.average_replayed <= variant.most_replayed
        assert variant.expected_rollback == variant.average_replayed + 0.5


LAPTOP = ["plan", str(PRESETS / "laptop.yaml"), "--ranks", "4", "--gpus-per-node", "1", "--d2h-bandwidth", "1"]


def test_a_window_of_one_iteration_names_dense_checkpoints_and_shows_nothing_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*LAPTOP, "--iteration-time", "2s", "--copy-bandwidth", "1", "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["window"] == 1
    shown = " ".join(" ".join(lines).split())
    assert re.search(r"\bdense\b", shown.partition("Host memory")[0])
    assert "by redo" not in shown
    assert "what would" not in shown, "no table where no row changes the window"
    assert main([*LAPTOP, "--iteration-time", "2s", "--copy-bandwidth", "0.0001"]) == 0
    assert "by redo" in capsys.readouterr().out


def test_memory_that_does_not_suffice_comes_first_and_fails_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    job = [*LAPTOP, "--iteration-time", "2", "--copy-bandwidth", "1"]
    codes = [
        main([*job, "--host-memory", memory, *check]) for memory in ("0.001", "10") for check in ((), ("--check",))
    ]
    assert codes == [0, 1, 0, 0]
    assert main([*job, "--host-memory", "0.001", "--json"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text.splitlines()[-1])["fits"] is False
    assert re.search(r"\b1 MB\b", text[: text.index("\u2503")]), "above the tables"
    assert main([*job, "--copy-bandwidth", "0.000001", "--window", "1", "--host-memory", "10", "--check"]) == 1
    with pytest.raises(SystemExit, match="2"):
        main([*job, "--check"])
    assert "--host-memory" in capsys.readouterr().err


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--list"])
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == sorted(path.stem for path in PRESETS.glob("*.yaml"))


def test_times_have_units_and_copies_their_own_bandwidth() -> None:
    assert [seconds(text) for text in ("90", "1.5h", "30m", "2.5s", "200ms", "2d", "10 min")] == [
        90.0, 5400.0, 1800.0, 2.5, 0.2, 172_800.0, 600.0,
    ]  # fmt: skip
    measured = replace(SLOW_NETWORK, copy_bytes_per_s=8_000.0)
    assert measured.replication_bytes_per_s == 1_000.0
    assert measured.with_faster_network(2).replication_bytes_per_s == 2_000.0
    assert planned(cluster=measured).size > planned().size


def test_presets_and_files_are_found() -> None:
    assert config_path("laptop") == PRESETS / "laptop.yaml"
    assert config_path(str(PRESETS / "laptop.yaml")) == PRESETS / "laptop.yaml"
    with pytest.raises(ConfigError):
        config_path(str(Path("/nowhere.yaml")))


def test_clusters_are_the_papers() -> None:
    assert CLUSTERS["moevement-a100"].replication_bytes_per_s == 1.25e9
    assert CLUSTERS["moevement-h100"].replication_bytes_per_s == 25e9 / 8
    assert parse("table7-row2").compute == "fp8"
