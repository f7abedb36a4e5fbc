"""Profile of a real run in seconds and bytes; ``moevement profile`` measures it, and the simulator reads it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from moevement_core.errors import ConfigError
from moevement_core.planning.cluster import Cluster

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class StageProfile:
    """Profile of one pipeline stage, measured on the slowest of its ranks."""

    forward_s: float
    """Forward seconds of a micro-batch in all chunks, with the communication inside (all-to-all, tensor parallelism).
    """
    backward_s: float
    layers: int
    parameters: int
    """Number of parameters on a rank."""
    layer_activation_bytes: int
    """Bytes that one layer keeps for the backward pass of a micro-batch, as a mean over the stage's layers."""
    layer_output_bytes: int


@dataclass(frozen=True, kw_only=True)
class SizeProfile:
    """Profile of all stages at one micro-batch size."""

    tokens: int
    """Number of tokens of a micro-batch on a rank."""
    micro_batches: int
    iteration_s: float
    """Median seconds of an iteration, measured while the timers for the other fields are off."""
    sync_s: float
    """Seconds that training waits for gradient reduction and parameter gathering."""
    update_s: float
    send_s: float
    """Seconds to send a boundary tensor to the next stage."""
    stages: tuple[StageProfile, ...]


@dataclass(frozen=True, kw_only=True)
class Affine:
    """Time model ``T(m, p) = a(p) + b(p) m`` of one collective on a group of p ranks (MoEvement, appendix C).

    Each rank sends a message of m bytes; a and b are fitted to measured seconds.
    """

    collective: str
    ranks: int
    a_s: float
    b_s_per_byte: float
    samples: tuple[tuple[int, float], ...] = ()
    """Measured pairs: bytes of the message of each rank, and seconds of the collective."""

    @classmethod
    def fit(cls, collective: str, ranks: int, samples: Sequence[tuple[int, float]]) -> Affine:
        """Return the time model with the least squared relative errors; its ``a`` and ``b`` are not negative.

        With relative errors, small messages have as much weight as large messages.

        Args:
            collective: name of the collective.
            ranks: number of ranks in the measured group.
            samples: measured pairs: bytes of the message of each rank, and seconds of the collective.

        Raises:
            ConfigError: all samples have the same message size.
        """
        if len({size for size, _ in samples}) < 2:
            raise ConfigError(f"{len(samples)} samples of {collective}; needs samples of at least two message sizes")
        sizes, seconds = (np.array(column, dtype=np.float64) for column in zip(*samples, strict=True))
        rows = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
        a, b = np.linalg.lstsq(rows, np.ones_like(seconds), rcond=None)[0]
        if a < 0:
            a, b = 0.0, float((sizes / seconds).sum() / ((sizes / seconds) ** 2).sum())
        elif b < 0:
            a, b = float((1 / seconds).sum() / (1 / seconds**2).sum()), 0.0
        return cls(
            collective=collective, ranks=ranks, a_s=float(a), b_s_per_byte=float(b),
            samples=tuple((int(size), float(seconds)) for size, seconds in samples),
        )  # fmt: skip

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of the collective with a message of ``nbytes`` from each rank."""
        return self.a_s + self.b_s_per_byte * nbytes

    def among(self, ranks: int) -> Affine:
        """Return the time model for another number of ranks, 2 or more, if the collective runs as a ring.

        In a ring, the number of steps is proportional to ``ranks - 1``, and the bytes that a rank sends are
        proportional to ``(ranks - 1) / ranks``.
        """
        steps, moved = ((ranks - 1) / (self.ranks - 1), (1 - 1 / ranks) / (1 - 1 / self.ranks))
        return replace(self, ranks=ranks, a_s=steps * self.a_s, b_s_per_byte=moved * self.b_s_per_byte, samples=())


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Profile of a run: times by micro-batch size, and bandwidths and collectives of the ranks."""

    device: str
    """Kind of the device, ``cuda`` or ``cpu``, and its name."""
    backend: str
    ranks: int
    pipeline: int
    chunks: int
    d2h_bytes_per_s: float
    """Bytes per second that a rank copies to its host while all ranks copy."""
    network_bytes_per_s: float
    """Bytes per second that all ranks together send, measured with the largest messages between pairs of ranks."""
    storage_bytes_per_s: float
    """Bytes per second that all ranks together write to storage. The time ends when the data is durable."""
    contention: float | None = None
    """Seconds that copies to peers add to training, divided by the seconds that links need for the copies alone. It is
    measured from iterations with and without copies; None: not measured."""
    cores: int = 0
    """Number of processors that ranks share for computation; 0 if each rank has a device of its own."""
    sizes: tuple[SizeProfile, ...]
    """Profiles of the run, one for each measured micro-batch size."""
    collectives: tuple[Affine, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for size in self.sizes:
            if len(size.stages) != self.pipeline:
                raise ConfigError(
                    f"the profile has times of {len(size.stages)} stages and pipeline size {self.pipeline}; both "
                    "numbers must be equal"
                )

    @property
    def ranks_of_stage(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.ranks // self.pipeline

    @property
    def cluster(self) -> Cluster:
        """Cluster of the measured machine, with one node for each rank."""
        return Cluster(
            1, self.d2h_bytes_per_s, self.network_bytes_per_s / self.ranks, storage_bytes_per_s=self.storage_bytes_per_s
        )

    def fit(self, collective: str, ranks: int) -> Affine | None:
        """Return the time model of a collective among ``ranks`` ranks, from the nearest measured number of ranks.

        Returns:
            The model; None if the collective was not measured among two or more ranks, or ``ranks`` is less than 2.
        """
        fits = [fit for fit in self.collectives if fit.collective == collective and fit.ranks > 1]
        if not fits or ranks < 2:
            return None
        return min(fits, key=lambda fit: abs(math.log(fit.ranks / ranks))).among(ranks)

    def save(self, path: Path) -> None:
        """Write the profile to a YAML file, and create the file's folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump({"format": FORMAT, **_plain(asdict(self))}, sort_keys=False, width=120)
        path.write_text("# moevement profile; docs/simulator.md\n" + text, encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Return the profile in a file.

        Raises:
            ConfigError: the file is unreadable, is not a profile, or has another format number than :data:`FORMAT`.
        """
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"profile {path}: {' '.join(str(error).split())}") from None
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            raise ConfigError(
                f"profile {path}: is not a profile of format {FORMAT}; write a new one with moevement profile"
            )
        values = {key: value for key, value in content.items() if key != "format"}
        try:
            values["sizes"] = tuple(_size(size) for size in values["sizes"])
            values["collectives"] = tuple(
                Affine(**{**collective, "samples": tuple(map(tuple, collective["samples"]))})
                for collective in values["collectives"]
            )
            profile = cls(**values)
        except (TypeError, KeyError) as error:
            raise ConfigError(f"profile {path}: {error}; write a new profile with moevement profile") from None
        parts: list[Profile | SizeProfile | StageProfile] = [profile, *profile.sizes]
        for part in (*parts, *(stage for size in profile.sizes for stage in size.stages)):
            for declared in dataclasses.fields(part):
                value = getattr(part, declared.name)
                if value is None and str(declared.type).endswith("| None"):
                    continue
                if str(declared.type).split(" ")[0] in ("int", "float") and (
                    isinstance(value, bool) or not isinstance(value, int | float)
                ):
                    raise ConfigError(f"profile {path}: {declared.name} {value!r}; needs a number")
        return profile


def _size(values: Mapping[str, Any]) -> SizeProfile:
    return SizeProfile(**{**values, "stages": tuple(StageProfile(**stage) for stage in values["stages"])})


def _plain(value: Any) -> Any:
    """Return a value with dicts and lists in place of other mappings and tuples, which YAML would write with tags."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
