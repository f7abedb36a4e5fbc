"""Numbers that operators of large jobs publish, each with its source, and the jobs that stand for them here.

A number that only a summary of its source confirmed is marked in :attr:`Report.checked`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.simulator.failure_rate import LLAMA_DAYS, LLAMA_GPUS, mean_time_between_failures_s
from moevement_core.simulator.regroup import Notice


@dataclass(frozen=True)
class Cause:
    """Cause of interruptions of the training of Llama 3 405B (arXiv 2407.21783, section 3.3.4, table 5).

    The counts are published. Notice and memory are this project's reading of the cause.
    """

    name: str
    count: int
    notice: Notice
    keeps_memory: bool = False
    """True if the failure ends processes only, and the node stays in the job."""


CAUSES = (
    Cause("faulty GPU", 148, Notice.SUPERVISOR),
    Cause("GPU memory (HBM3)", 72, Notice.SUPERVISOR),
    Cause("software bug", 54, Notice.SUPERVISOR, keeps_memory=True),
    Cause("network switch or cable", 35, Notice.LEASE),
    Cause("host maintenance", 32, Notice.RESET),
    Cause("other parts of a GPU, silent corruption", 19 + 17 + 6 + 6, Notice.SUPERVISOR),
    Cause("NIC, SSD, power, chassis, board, CPU, host memory", 7 + 3 + 3 + 2 + 2 + 2 + 2, Notice.LEASE),
    Cause("watchdog timeout", 7, Notice.LEASE, keeps_memory=True),
    Cause("dependency", 2, Notice.SUPERVISOR, keeps_memory=True),
)


@dataclass(frozen=True)
class Claim:
    """Published figure of one way of handling failures."""

    way: str
    """Way of handling failures, by its name in the source."""
    simulated_as: str | None
    """Row of this project's table with the same policy; None if the simulator has no such policy."""
    shown: str
    """Figure as the page prints it."""
    ettr: float | None
    """Effective training time ratio; None if the source gives another quantity."""


@dataclass(frozen=True)
class Report:
    """Published report of a large job, and the simulated job that stands for it."""

    source: str
    link: str
    gpus: int
    """Number of GPUs in the report."""
    claims: tuple[Claim, ...]
    checked: str
    """Numbers of the source that were found, and where."""
    preset: str
    """Nearest scenario in examples/simulate."""
    reason: str
    """Reason why this scenario is the nearest."""
    ranks: int
    """Simulated GPUs: the nearest number that the layout of the scenario divides."""
    days: float
    """Simulated days."""
    mtbf_s: float
    mtbf_source: str
    restart_s: float
    """Seconds from a failure until a job that restarts from storage begins to load its checkpoint."""
    restart_source: str
    storage: float = 2000.0
    """GB per second of storage, all nodes together. The default is the sustained rate that Llama 3 reports."""
    iteration_s: float | None = None
    """Seconds of an iteration; None for an estimate from the rates of the cluster."""
    interval: int | None = None
    """Iterations between two checkpoints in storage; None for the interval of Young and Daly."""
    spacing_s: tuple[float, float] | None = None
    """Least and most seconds between failures, evenly distributed; None for a Poisson process."""


STEPS = 3000
"""Iterations of TorchPass's benchmark."""
RESTARTED, MIGRATED, REPLICA = 818, 405, 930
"""Minutes of TorchPass's benchmark with checkpoint restarts, with TorchPass and with TorchFT."""

REPORTS = (
    Report(
        source="ByteRobust",
        link="https://arxiv.org/abs/2509.16293",
        gpus=9600,
        claims=(Claim("a checkpoint every step", "gemini", "97%", 0.97),),
        checked="97% ETTR, three months and 9,600 GPUs are in its abstract. Second-hand: its model is dense, it "
        "saves every step, and a MoE had 91%. Not found: how often it failed",
        preset="deepseek_67b",
        reason="layouts of larger presets do not divide 9,600",
        ranks=9600,
        days=90,
        mtbf_s=mean_time_between_failures_s(9600),
        mtbf_source="Llama 3's rate",
        restart_s=600.0,
        restart_source="FT-HSDP's",
    ),
    Report(
        source="Llama 3",
        link="https://arxiv.org/abs/2407.21783",
        gpus=LLAMA_GPUS,
        claims=(Claim("restart from storage", "restart", "over 90%", 0.90),),
        checked="section 3.3.4 has GPUs, days, [causes](https://glennklockwood.com/garden/component-reliability) "
        "and 90%, read second-hand. Not found: interval, seconds of a restart",
        preset="deepseek_671b",
        reason="it has 16,384 GPUs; Llama 3 405B is dense, with 60% of its parameters",
        ranks=LLAMA_GPUS,
        days=LLAMA_DAYS,
        mtbf_s=mean_time_between_failures_s(LLAMA_GPUS),
        mtbf_source="419 in 54 days",
        restart_s=600.0,
        restart_source="FT-HSDP's",
    ),
    Report(
        source="FT-HSDP",
        link="https://arxiv.org/abs/2602.00277",
        gpus=100_000,
        claims=(
            Claim("all stop and restart", "restart", "44%", 0.44),
            Claim("other replicas continue", None, "80%", 0.80),
        ),
        checked="44%, 80% and stalls of 10 and 3 minutes are in its abstract. Second-hand: a failure every 18 "
        "minutes. Not found: the model",
        preset="deepseek_671b",
        reason="it is the largest; 98,304 GPUs are six times its own",
        ranks=98_304,
        days=14,
        mtbf_s=1080.0,
        mtbf_source="second-hand",
        restart_s=600.0,
        restart_source="published",
    ),
    Report(
        source="TorchPass",
        link="https://clockwork.io/blog/keeping-distributed-training-running-through-failures",
        gpus=64,
        claims=(
            Claim("checkpoint restart", "restart", f"{RESTARTED} min", MIGRATED / RESTARTED),
            Claim("migration to a spare", None, f"{MIGRATED} min", None),
            Claim("TorchFT, a replica group leaves", None, f"{REPLICA} min", None),
        ),
        checked="the blog has all minutes, a checkpoint every 100 of 3,000 steps, and 2,700 to 4,500 s between "
        "failures. Not found: minutes without failures, seconds of a restart",
        preset="qwen3_30b_a3b",
        reason="it is the only MoE preset that fits 64 GPUs; Llama 4 Scout has 109 billion parameters",
        ranks=64,
        days=1,
        mtbf_s=3600.0,
        mtbf_source="2,700 to 4,500 s",
        restart_s=900.0,
        restart_source="[15 minutes](https://clockwork.io/workload-failover)",
        storage=20.0,
        iteration_s=MIGRATED * 60 / STEPS,
        interval=100,
        spacing_s=(2700.0, 4500.0),
    ),
)  # fmt: skip
