"""Profiles: fits, files, and simulations that use them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from moevement_cli.profile import contention_of
from moevement_cli.simulate import SCENARIOS
from moevement_core.errors import ConfigError
from moevement_core.planning.profile import Affine, Profile, SizeProfile, StageProfile
from moevement_core.simulator.iteration import from_profile
from moevement_core.simulator.scenario import Scenario, load
from tests.unit.models import BASE
from tests.unit.simulator.jobs import closed_form_s

STAGE = StageProfile(
    forward_s=0.1, backward_s=0.2, layers=2, parameters=1000, layer_activation_bytes=10, layer_output_bytes=5
)
PROFILE = Profile(
    device="cpu",
    backend="gloo",
    ranks=4,
    pipeline=2,
    chunks=1,
    d2h_bytes_per_s=1e9,
    network_bytes_per_s=2e9,
    storage_bytes_per_s=3e8,
    cores=2,
    sizes=(
        SizeProfile(
            tokens=32,
            micro_batches=4,
            iteration_s=3.0,
            sync_s=0.1,
            update_s=0.2,
            send_s=0.01,
            stages=(STAGE, replace(STAGE, forward_s=0.15)),
        ),
    ),
    collectives=(Affine.fit("all_reduce", 2, [(1000, 0.001), (1000000, 0.002)]),),
    versions={"torch": "1"},
)


@given(a=st.floats(1e-6, 1e-2), b=st.floats(1e-12, 1e-8))
@settings(max_examples=30, deadline=None)
def test_an_affine_time_is_found_again(a: float, b: float) -> None:
    sizes = [1 << power for power in range(10, 24, 2)]
    fit = Affine.fit("all_to_all", 4, [(size, a + b * size) for size in sizes])
    assert fit.a_s == pytest.approx(a, rel=1e-3)
    assert fit.b_s_per_byte == pytest.approx(b, rel=1e-3)


def test_a_fit_is_never_negative() -> None:
    assert Affine.fit("send", 2, [(1000, 1.0), (2000, 0.5)]).b_s_per_byte == 0
    falling = Affine.fit("send", 2, [(1000, 0.001), (2000, 0.01)])
    assert falling.a_s == 0
    assert falling.b_s_per_byte > 0
    with pytest.raises(ConfigError, match=r"\b1 samples?\b.*\bsend\b"):
        Affine.fit("send", 2, [(1000, 1.0)])


@pytest.mark.parametrize("contention", [None, 0.3])
def test_a_profile_is_read_as_it_was_written(tmp_path: Path, contention: float | None) -> None:
    written = replace(PROFILE, contention=contention)
    written.save(tmp_path / "deep" / "profile.yaml")
    assert Profile.load(tmp_path / "deep" / "profile.yaml") == written


def test_contention_is_what_sends_cost_of_the_time_that_they_would_take_of_links() -> None:
    parts = {"overhead_copy": 0.05, "overhead_digest": 0.02, "overhead_send": 0.08}
    lines: list[dict[str, Any]] = [{"replicated_bytes": 0}, {"replicated_bytes": 300_000_000}]
    assert contention_of(lines, PROFILE) is None, "no iteration was compared"
    lines.append({"replicated_bytes": 300_000_000, "overhead": 0.15, **parts})
    # Digests and sends take a tenth of 3 s; links of 500 MB/s take 0.4 s for the mean of 200 MB.
    assert contention_of(lines, PROFILE) == pytest.approx(0.3 / 0.4)
    assert contention_of([{**line, "replicated_bytes": 0} for line in lines], PROFILE) is None, "nothing was sent"
    lines[-1] |= {"overhead_send": -0.2}
    assert contention_of(lines, PROFILE) == 0.0


def test_among_more_ranks_synchronisation_takes_as_long_as_the_collectives_say() -> None:
    fits = (
        Affine(collective="reduce_scatter", ranks=2, a_s=0.001, b_s_per_byte=1e-9),
        Affine(collective="reduce_scatter", ranks=4, a_s=0.004, b_s_per_byte=2e-9),
        Affine(collective="all_gather", ranks=2, a_s=0.002, b_s_per_byte=1e-9),
    )
    profile = replace(PROFILE, collectives=fits)
    assert profile.fit("reduce_scatter", 1) is None
    assert profile.fit("all_to_all", 2) is None
    wide = profile.fit("reduce_scatter", 8)
    assert wide is not None
    assert (wide.a_s, wide.b_s_per_byte) == (pytest.approx(0.004 * 7 / 3), pytest.approx(2e-9 * (7 / 8) / (3 / 4)))
    job = load(SCENARIOS / "laptop.yaml").job
    measured = replace(profile, sizes=(replace(profile.sizes[0], tokens=job.tokens, micro_batches=2),))

    def sync_s(ranks: int) -> float:
        return from_profile(measured, replace(job, ranks=ranks)).sync_s

    # 1,000 parameters of a rank: gradients of 4 kB are reduced, parameters of 2 kB gathered.
    two = 0.001 + 4e3 * 1e-9 + 0.002 + 2e3 * 1e-9
    eight = wide.seconds(4e3) + 0.002 * 7 + 2e3 * 1e-9 * (7 / 8) / (1 / 2)
    assert sync_s(16) / 0.1 == pytest.approx(eight / two)
    assert sync_s(2) == 0.0


def test_a_scenario_takes_contention_from_its_profile_unless_it_has_its_own() -> None:
    scenario = load(SCENARIOS / "laptop.yaml")
    assert scenario.profile is not None
    without, measured = (
        replace(scenario, profile=replace(scenario.profile, contention=contention)) for contention in (None, 0.3)
    )
    fixed = replace(measured, checkpointing=replace(measured.checkpointing, contention=0.0))
    assert [variant.contention for variant in (without, measured, fixed)] == [0.0, 0.3, 0.0]
    assert [variant.costs().plan.inputs.contention for variant in (measured, fixed)] == [0.3, 0.0]


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"format": 9}, r"\bformat 1\b"),
        ({"pipeline": 3}, r"\b2 stages\b.*\bpipeline size 3\b"),
        ({"cores": "many"}, r"\bcores 'many'"),
        ({"sizes": [{"tokens": 1, "stages": []}]}, r"'micro_batches'"),
        ({"speed": 1}, r"'speed'"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, change: dict[str, object], pattern: str) -> None:
    path = tmp_path / "profile.yaml"
    PROFILE.save(path)
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=pattern):
        Profile.load(path)


def scenario_of(tmp_path: Path, **parallel: int) -> Scenario:
    PROFILE.save(tmp_path / "profile.yaml")
    path = tmp_path / "scenario.yaml"
    layout = {"ranks": 4, "pipeline": 2, "expert": 2, **parallel}
    path.write_text(
        yaml.safe_dump({"job": {**BASE, "global_batch_size": 8}, "parallel": layout, "profile": "profile.yaml"})
    )
    return load(path)


def test_the_job_that_was_measured_takes_as_long(tmp_path: Path) -> None:
    scenario = scenario_of(tmp_path)
    assert scenario.time.total_s == pytest.approx(3.0)
    assert scenario.cluster.storage_bytes_per_s == 3e8
    assert scenario.costs().plan.inputs.iteration_s == pytest.approx(3.0)


def test_other_jobs_follow_from_the_parts(tmp_path: Path) -> None:
    """Double the data-parallel ranks, which halves their micro-batches to 2. The time is (2 + 1) 0.35 + 0.3 s."""
    times = scenario_of(tmp_path, ranks=8).time
    assert closed_form_s(times) == pytest.approx(3 * 0.35 + 0.3)
    assert times.total_s <= closed_form_s(times) + 4 * 0.01
    with pytest.raises(ConfigError, match=r"\bprofile\b.*\b2 stages\b.*\bjob\b.*\b4\b"):
        _ = scenario_of(tmp_path, ranks=8, pipeline=4).time


def test_ranks_that_share_processors_get_more_of_them_alone(tmp_path: Path) -> None:
    """Let four ranks share two cores, so that two of them alone are twice as fast."""
    job = scenario_of(tmp_path).job
    shared, own = (from_profile(replace(PROFILE, cores=cores), job) for cores in (2, 0))
    assert shared.segment_s([0]) == pytest.approx(own.segment_s([0]) / 2)
    assert shared.segment_s([0, 1]) == pytest.approx(own.segment_s([0, 1]))
