"""Numbers that the papers publish in their text and tables."""

from __future__ import annotations

from dataclasses import dataclass

MTBFS_S = (7200, 3600, 1800, 1200, 600)
HOURS = 12


@dataclass(frozen=True)
class System:
    """Results of one system on one model in MoEvement's table 3."""

    name: str
    interval: int | None
    """Iterations between checkpoints, or W for MoEvement. None: the interval depends on the failure rate."""
    overhead: float
    """Overhead as a share of an iteration, at a failure every two hours."""
    recovery_s: tuple[float, ...]
    """Seconds of recovery, summed over twelve hours, by failure rate."""
    ettr: tuple[float, ...]


@dataclass(frozen=True)
class Model:
    """Model of table 3. ``preset`` is the name of its scenario."""

    preset: str
    parameters: float
    systems: tuple[System, ...]
    gemini_gb: float
    """Host memory of Gemini in GB, all nodes together (table 6)."""
    sparse_gb: float
    """Size of MoEvement's snapshots in GB, all nodes together (table 6)."""
    logs_gb: float
    """Size of MoEvement's logs in GB, all nodes together (table 6)."""
    sparse_only: float
    """ETTR with sparse checkpoints alone (figure 13)."""
    skewed_gain: float
    """Gain of ETTR by reordering (figure 13)."""


MODELS = (
    Model(preset="moe_llava", parameters=2.9e9, systems=(
        System(name="checkfreq", interval=57, overhead=0.02, recovery_s=(1265, 2530, 5059, 7589, 11178), ettr=(0.945, 0.914, 0.853, 0.792, 0.712)),
        System(name="gemini", interval=None, overhead=0.01, recovery_s=(938, 1551, 2203, 2570, 4161), ettr=(0.959, 0.939, 0.897, 0.852, 0.764)),
        System(name="moc", interval=1, overhead=0.08, recovery_s=(10, 20, 41, 61, 98), ettr=(0.922, 0.375, 0.328, 0.231, 0.184)),
        System(name="moevement", interval=3, overhead=0.01, recovery_s=(11, 24, 57, 74, 117), ettr=(0.981, 0.979, 0.975, 0.971, 0.964)),
    ), gemini_gb=75.4, sparse_gb=81.2, logs_gb=1.9, sparse_only=0.57, skewed_gain=0.0),
    Model(preset="gpt_moe", parameters=7.3e9, systems=(
        System(name="checkfreq", interval=78, overhead=0.01, recovery_s=(1424, 2848, 4486, 8543, 13086), ettr=(0.937, 0.903, 0.834, 0.765, 0.687)),
        System(name="gemini", interval=None, overhead=0.01, recovery_s=(1121, 1718, 2160, 3259, 4627), ettr=(0.947, 0.923, 0.868, 0.815, 0.722)),
        System(name="moc", interval=1, overhead=0.09, recovery_s=(13, 25, 50, 76, 132), ettr=(0.919, 0.384, 0.326, 0.220, 0.179)),
        System(name="moevement", interval=3, overhead=0.01, recovery_s=(18, 28, 78, 105, 161), ettr=(0.979, 0.976, 0.971, 0.966, 0.959)),
    ), gemini_gb=189.8, sparse_gb=205.2, logs_gb=4.2, sparse_only=0.43, skewed_gain=0.15),
    Model(preset="qwen_moe", parameters=14.3e9, systems=(
        System(name="checkfreq", interval=113, overhead=0.02, recovery_s=(1170, 2340, 4680, 7020, 10040), ettr=(0.927, 0.898, 0.841, 0.783, 0.703)),
        System(name="gemini", interval=None, overhead=0.02, recovery_s=(961, 1402, 2114, 2331, 3495), ettr=(0.934, 0.915, 0.868, 0.819, 0.717)),
        System(name="moc", interval=1, overhead=0.09, recovery_s=(15, 30, 60, 90, 146), ettr=(0.927, 0.380, 0.325, 0.205, 0.162)),
        System(name="moevement", interval=5, overhead=0.02, recovery_s=(17, 33, 83, 140, 207), ettr=(0.981, 0.977, 0.970, 0.963, 0.957)),
    ), gemini_gb=371.6, sparse_gb=420.8, logs_gb=12.4, sparse_only=0.37, skewed_gain=0.32),
    Model(preset="deepseek_moe", parameters=16.4e9, systems=(
        System(name="checkfreq", interval=124, overhead=0.03, recovery_s=(992, 1984, 3967, 5951, 9402), ettr=(0.902, 0.877, 0.827, 0.777, 0.672)),
        System(name="gemini", interval=None, overhead=0.02, recovery_s=(800, 1218, 1879, 1983, 3236), ettr=(0.910, 0.894, 0.853, 0.814, 0.728)),
        System(name="moc", interval=1, overhead=0.08, recovery_s=(17, 35, 70, 104, 176), ettr=(0.933, 0.349, 0.324, 0.168, 0.134)),
        System(name="moevement", interval=6, overhead=0.02, recovery_s=(22, 43, 104, 167, 241), ettr=(0.975, 0.970, 0.965, 0.956, 0.951)),
    ), gemini_gb=426.4, sparse_gb=478.7, logs_gb=21.1, sparse_only=0.49, skewed_gain=0.32),
)  # fmt: skip
"""Models of MoEvement's tables 2, 3 and 6 and figure 13. The paper rounds overheads to percent."""

GEMINI_EVERY_ITERATION = 2.5
"""Factor by which Gemini slows DeepSeek-MoE on 96 A100 with a checkpoint in every iteration (figure 1a)."""
GEMINI_BEST = {7200: 0.93, 1800: 0.79, 600: 0.47}
"""Best ETTR of Gemini by MTBF in seconds (figure 1b)."""


@dataclass(frozen=True)
class Precision:
    """Row of MoEvement's table 7, with a failure every hour and every ten minutes."""

    gemini: tuple[tuple[int, float], ...]
    """Pairs of interval and overhead per iteration in seconds, for a failure every 60, 30 and 10 minutes."""
    checkfreq: tuple[int, float]
    window: int
    ettr: dict[str, tuple[float, float]]
    """ETTR by system, for a failure every hour and every ten minutes."""
    recovery_s: dict[str, tuple[float, float]]


TABLE_7 = (
    Precision(
        gemini=((71, 0.11), (48, 0.16), (27, 0.29)), checkfreq=(77, 0.11), window=3,
        ettr={"checkfreq": (0.918, 0.706), "gemini": (0.925, 0.885), "moc": (0.613, 0.425), "moevement": (0.984, 0.973)},
        recovery_s={"checkfreq": (2036, 10648), "gemini": (1854, 4324), "moc": (79, 246), "moevement": (86, 268)},
    ),
    Precision(
        gemini=((182, 0.09), (94, 0.17), (46, 0.34)), checkfreq=(227, 0.09), window=6,
        ettr={"checkfreq": (0.853, 0.302), "gemini": (0.878, 0.718), "moc": (0.357, 0.115), "moevement": (0.952, 0.941)},
        recovery_s={"checkfreq": (5162, 28574), "gemini": (3591, 5446), "moc": (48, 185), "moevement": (59, 232)},
    ),
    Precision(
        gemini=((157, 0.08), (79, 0.16), (43, 0.30)), checkfreq=(205, 0.08), window=4,
        ettr={"checkfreq": (0.881, 0.439), "gemini": (0.893, 0.738), "moc": (0.368, 0.163), "moevement": (0.966, 0.953)},
        recovery_s={"checkfreq": (3763, 22581), "gemini": (2846, 4756), "moc": (45, 151), "moevement": (53, 172)},
    ),
    Precision(
        gemini=((68, 0.10), (61, 0.11), (29, 0.22)), checkfreq=(94, 0.10), window=3,
        ettr={"checkfreq": (0.916, 0.739), "gemini": (0.923, 0.806), "moc": (0.557, 0.321), "moevement": (0.976, 0.965)},
        recovery_s={"checkfreq": (1554, 9322), "gemini": (1108, 2934), "moc": (52, 196), "moevement": (57, 213)},
    ),
    Precision(
        gemini=((59, 0.09), (52, 0.18), (24, 0.31)), checkfreq=(78, 0.09), window=3,
        ettr={"checkfreq": (0.937, 0.752), "gemini": (0.943, 0.816), "moc": (0.584, 0.326), "moevement": (0.979, 0.971)},
        recovery_s={"checkfreq": (1153, 6921), "gemini": (876, 2100), "moc": (40, 162), "moevement": (44, 178)},
    ),
)  # fmt: skip
"""Rows of table 7 in the order of ``moevement_core.precision.TABLE_7``.

One column of the paper's table gives the overhead of both CheckFreq and Gemini.
"""

TABLE_7_ITERATION_S = tuple(
    round(stall / share, 2)
    for stall, share in zip((2.91, 8.89, 7.25, 2.92, 2.19), (0.97, 3.86, 3.45, 1.54, 1.29), strict=True)
)
"""Seconds of an iteration: MoC's published overhead in seconds, divided by its share of an iteration."""

SCALED = {
    "deepseek_32b": {}, "deepseek_67b": {}, "deepseek_145b": {},
    "deepseek_671b": {("moevement", 600): 0.86, ("gemini", 600): 0.55},
}  # fmt: skip
"""Values of figure 11 in the paper's text. It also says that MoEvement stays above 0.91 with a failure every hour."""

SKEWED = {"checkfreq": (0.67, 0.67), "gemini": (0.72, 0.72), "moc": (0.17, 0.13)}
"""ETTR at skew 0 and 0.99 with a failure every ten minutes (figure 16). The paper has no values for MoEvement."""
SKEW_ALPHAS = {0.25: 0.0469, 0.50: 0.0156, 0.75: 0.0052, 0.99: 0.000158}
"""Dirichlet alphas by skew (appendix D)."""

GOODPUT_RATIOS = {"checkfreq": 1.25, "gemini": 1.15, "moc": 1.98}
"""Ratios of MoEvement's goodput to that of each system, on six hours of the GCP trace with 24 failures (figure 10)."""
