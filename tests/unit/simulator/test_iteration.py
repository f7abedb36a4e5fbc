"""Iteration times from FLOP, bytes and nodes: computed by hand, and properties that hold for any numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moevement_cli.simulate import SCENARIOS
from moevement_core.errors import ConfigError
from moevement_core.planning.cluster import CLUSTERS, Cluster
from moevement_core.planning.transformer import Layout, Transformer, describe
from moevement_core.simulator.iteration import from_machines, from_total
from moevement_core.simulator.scenario import load
from tests.unit.simulator.jobs import closed_form_s

A100 = CLUSTERS["moevement-a100"]
MODEL = Transformer(
    num_layers=8, hidden_size=1024, num_attention_heads=8, vocab_size=32000, seq_length=1024, num_experts=16,
    moe_router_topk=2, moe_ffn_hidden_size=2048,
)  # fmt: skip
LAYOUT = Layout(ranks=32, pipeline=4, expert=8, global_batch_size=64)


def test_a_stage_by_hand() -> None:
    """Compute one layer without experts by hand, on a GPU that reaches its full 1 TFLOPS."""
    model = Transformer(
        num_layers=1, hidden_size=512, num_attention_heads=8, vocab_size=1024, seq_length=256, ffn_hidden_size=1024,
        swiglu=False,
    )  # fmt: skip
    job = describe("one", model, Layout(ranks=1, global_batch_size=3))
    times = from_machines(job, Cluster(1, 1e9, 1e9, flops=1e12, utilization=1.0, link_bytes_per_s=1e9))
    tokens, hidden = 256, 512
    products = 2 * tokens * (4 * hidden**2 + 2 * hidden * 1024 + 2 * hidden + hidden + 1024 * hidden)
    scores = 2 * tokens * 256 * hidden
    assert times.total_s == pytest.approx(3 * 3 * (products + scores) / 1e12)
    assert closed_form_s(times) == pytest.approx(times.total_s)


def test_an_all_to_all_leaves_the_node_when_the_experts_do() -> None:
    inside, across = (
        from_machines(describe("made", MODEL, replace(LAYOUT, ranks=64, expert=expert)), A100) for expert in (8, 16)
    )
    assert across.pipelines[0].forward_s[1] > 1.5 * inside.pipelines[0].forward_s[1]


@given(
    flops=st.floats(1e12, 1e15), link=st.floats(1e9, 1e12), network=st.floats(1e8, 1e11), overlap=st.floats(0, 1),
    more=st.floats(1, 10),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_faster_machine_is_never_slower(
    flops: float, link: float, network: float, overlap: float, more: float
) -> None:
    job = describe("made", MODEL, LAYOUT)
    slow = replace(A100, flops=flops, link_bytes_per_s=link, network_bytes_per_s=network, overlap=overlap)
    seconds = from_machines(job, slow).total_s
    for change in (
        {"flops": flops * more}, {"link_bytes_per_s": link * more}, {"network_bytes_per_s": network * more},
        {"overlap": min(1.0, overlap * more)},
    ):  # fmt: skip
        assert from_machines(job, replace(slow, **change)).total_s <= seconds * (1 + 1e-9)  # type: ignore[arg-type]


def test_the_slowest_node_sets_the_pace() -> None:
    """Use four nodes, one for each stage. One slow node costs less than four slow nodes."""
    job = describe("made", MODEL, LAYOUT)
    even = from_machines(job, A100).total_s
    slow_last, slow_all = (
        from_machines(job, replace(A100, speeds=speeds)).total_s for speeds in (((1.0, 3), (0.5, 1)), ((0.5, 4),))
    )
    assert even < slow_last < slow_all
    fast = from_machines(job, replace(A100, speeds=((2.0, 3),))).total_s
    assert fast < even, "the fourth node has the speed 1"


def test_replicas_on_different_nodes_are_pipelines_of_their_own() -> None:
    """Use two nodes for each stage and slow down one node, so that there are two kinds of pipelines."""
    job = describe("made", MODEL, replace(LAYOUT, ranks=64))
    times = from_machines(job, replace(A100, speeds=((1.0, 2), (0.5, 1))))
    assert len(times.pipelines) == 2
    assert times.total_s > from_machines(job, A100).total_s


@pytest.mark.parametrize("name", sorted(path.stem for path in SCENARIOS.glob("*.yaml")))
def test_closed_form_and_event_simulation_agree(name: str) -> None:
    """Compare them: they agree for equal stages. Else the closed form takes the slowest stage's time for each stage."""
    scenario = load(SCENARIOS / f"{name}.yaml")
    even = from_total(3.0, scenario.job)
    assert even.total_s == pytest.approx(closed_form_s(even), rel=0.005)
    sends = 2 * scenario.job.pipeline_parallel * max(pipeline.send_s for pipeline in scenario.time.pipelines)
    assert scenario.time.total_s <= (closed_form_s(scenario.time) + sends) * (1 + 1e-9)


def test_a_cluster_that_says_nothing_of_its_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--iteration-time\b.*\btflops\b.*\bnvlink\b"):
        from_machines(describe("made", MODEL, LAYOUT), Cluster(8, 1e9, 1e9))
