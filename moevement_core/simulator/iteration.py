"""Length of an iteration: pipelines, exposed gradient synchronisation, the update (MoEvement, appendix C)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from moevement_core.description.cluster import Cluster
from moevement_core.description.job import JobShape, StageShape
from moevement_core.description.profile import Profile, SizeProfile
from moevement_core.errors import ConfigError
from moevement_core.operators import OperatorKind
from moevement_core.simulator.pipeline import Pipeline

BACKWARD_OVER_FORWARD = 2.0
"""Two matrix products for each of the forward pass."""
ELEMENT_BYTES = 2
"""Bytes of an element of activations and of gathered parameters."""
GRADIENT_BYTES = 4
"""Megatron reduces gradients in FP32."""


@dataclass(frozen=True)
class IterationTime:
    """``max(T_pipeline) + T_sync + T_update``; seconds."""

    pipelines: tuple[Pipeline, ...]
    """Pipelines of data-parallel replicas that differ; one if all are alike."""
    sync_s: float = 0.0
    """Seconds of gradient reduction and parameter gathering that do not overlap with computation."""
    update_s: float = 0.0
    ranks_of_stage: int = 1
    cores: int = 0
    """Processors that all ranks share, where seconds were measured so; 0 if each rank has its own device."""

    @cached_property
    def total_s(self) -> float:
        """Seconds of an iteration by event simulation of the slowest pipeline."""
        return max(one.simulate() for one in self.pipelines) + self.sync_s + self.update_s

    @property
    def closed_form_s(self) -> float:
        """Seconds of an iteration by the paper's formula."""
        return max(one.closed_form() for one in self.pipelines) + self.sync_s + self.update_s

    @property
    def stages(self) -> int:
        """Number of pipeline stages S."""
        return self.pipelines[0].stages

    def segment_s(self, segment: Iterable[int]) -> float:
        """Seconds in which neighbouring stages replay an iteration, fed from logs, the others waiting.

        One stage has no bubble; several have the bubble of a pipeline of their number. Ranks that share processors get
        more of them when others wait.
        """
        stages = sorted(segment)
        seconds = max(one.part(stages).simulate() for one in self.pipelines) + self.sync_s + self.update_s
        return seconds * self._crowd(len(stages)) / self._crowd(self.stages)

    def _crowd(self, stages: int) -> float:
        """Return the factor by which ranks on so many stages slow each other down."""
        return max(1.0, stages * self.ranks_of_stage / self.cores) if self.cores else 1.0

    def scaled(self, factor: float) -> IterationTime:
        """Return the same with all seconds multiplied by ``factor``."""
        return replace(
            self,
            pipelines=tuple(
                replace(
                    one,
                    forward_s=tuple(factor * each for each in one.forward_s),
                    backward_s=tuple(factor * each for each in one.backward_s),
                    send_s=factor * one.send_s,
                )
                for one in self.pipelines
            ),
            sync_s=factor * self.sync_s,
            update_s=factor * self.update_s,
        )


def from_total(iteration_s: float, job: JobShape) -> IterationTime:
    """Stages that are alike, of an iteration whose length is known; a third of the work is forward."""
    stages, count = job.pipeline_parallel, job.micro_batches
    each = iteration_s / (count + (stages - 1) / job.chunks)
    return IterationTime((_even(stages, count, job.chunks, each),))


def _even(stages: int, micro_batches: int, chunks: int, each: float) -> Pipeline:
    forward = each / (1 + BACKWARD_OVER_FORWARD)
    return Pipeline((forward,) * stages, (each - forward,) * stages, micro_batches, chunks)


def from_profile(profile: Profile, job: JobShape) -> IterationTime:
    """Return the measured iteration time, for any number of micro-batches and of data-parallel ranks.

    Among another number of ranks synchronisation takes as much longer as the measured collectives say (appendix C). For
    the very job that was measured the parts are scaled so that they add up to the iteration that was.

    Raises:
        ConfigError: another pipeline, or other micro-batches, than the profile is of.
    """
    found = {one.tokens: one for one in profile.sizes}
    if (profile.pipeline, profile.chunks) != (job.pipeline_parallel, job.chunks) or job.tokens not in found:
        sizes = ", ".join(map(str, sorted(found)))
        raise ConfigError(
            f"a profile of {profile.pipeline} stages, {profile.chunks} chunks and micro-batches of {sizes} tokens for "
            f"a job of {job.pipeline_parallel}, {job.chunks} and {job.tokens}; measure one of its own"
        )
    size = found[job.tokens]
    forward, backward = (tuple(getattr(one, name) for one in size.stages) for name in ("forward_s", "backward_s"))
    pipeline = Pipeline(forward, backward, job.micro_batches, job.chunks, size.send_s)
    of_stage = job.ranks // job.pipeline_parallel
    made = IterationTime((pipeline,), _profiled_sync_s(profile, size, of_stage), size.update_s, of_stage, profile.cores)
    if (job.ranks, job.micro_batches) != (profile.ranks, size.micro_batches):
        return made
    return made.scaled(size.iteration_s / made.total_s)


def _profiled_sync_s(profile: Profile, size: SizeProfile, ranks: int) -> float:
    """Return what is exposed of synchronisation among so many ranks of a stage: the same share as was measured."""
    measured_s, wanted_s = (_synchronised_s(profile, size, each) for each in (profile.ranks_of_stage, ranks))
    if not measured_s:  # one rank, which had nobody to wait for, or collectives that were not measured
        return size.sync_s + wanted_s
    return size.sync_s * wanted_s / measured_s


def _synchronised_s(profile: Profile, size: SizeProfile, ranks: int) -> float:
    """Return the seconds in which so many ranks reduce gradients and gather parameters of the largest stage; 0.0 where
    no collective was measured, or of one rank.
    """
    reduce, gather = (profile.fit(name, ranks) for name in ("reduce_scatter", "all_gather"))
    if reduce is None or gather is None:
        return 0.0
    most = max(stage.parameters for stage in size.stages)
    return reduce.seconds(GRADIENT_BYTES * most) + gather.seconds(ELEMENT_BYTES * most)


def from_machines(job: JobShape, cluster: Cluster) -> IterationTime:
    """Estimate the iteration time from FLOP and bytes: matrix products at the GPU's rate, all-to-all, sends,
    synchronisation over links.

    Attention scores count, embedding and norms do not. All-to-all stays on NVLink where the expert-parallel ranks of a
    stage share a node. Gradients go once through the network in FP32 and parameters once in 16 bit, each
    ``(n - 1) / n`` of their bytes; of that, ``cluster.overlap`` hides behind the backward pass.

    Raises:
        ConfigError: the cluster says nothing of its GPUs, or the job nothing of its tokens.
    """
    if cluster.flops is None or cluster.link_bytes_per_s is None:
        raise ConfigError(
            "neither seconds of an iteration nor what a GPU computes; give --iteration-time, a profile, or tflops and "
            "nvlink of the cluster"
        )
    if not job.tokens:
        raise ConfigError(f"job {job.name} does not say how many tokens a micro-batch has; give the iteration time")
    forward = tuple(_forward_s(job, stage, cluster) for stage in job.stages)
    pipeline = Pipeline(
        forward,
        tuple(BACKWARD_OVER_FORWARD * one for one in forward),
        job.micro_batches,
        job.chunks,
        job.boundary_bytes / (cluster.network_bytes_per_s / cluster.gpus_per_node),
    )
    exposed = max(_sync_s(stage, cluster, job) for stage in job.stages) * (1 - cluster.overlap)
    update = max(_update_s(stage, cluster, job) for stage in job.stages)
    return IterationTime(tuple(_on_nodes(pipeline, job, cluster)), exposed, update)


def _forward_s(job: JobShape, stage: StageShape, cluster: Cluster) -> float:
    """Return the forward seconds of a micro-batch on a stage, all-to-all included."""
    assert cluster.flops is not None
    assert cluster.link_bytes_per_s is not None
    tokens, products, layers = job.tokens, 0.0, 0
    experts = [one for one in stage.operators if one.kind is OperatorKind.EXPERT]
    gates = sum(one.kind is OperatorKind.GATE for one in stage.operators)
    for one in stage.operators:
        if one.kind in (OperatorKind.NON_EXPERT, OperatorKind.GATE, OperatorKind.HEAD, OperatorKind.LAYER):
            products += 2.0 * one.parameters * tokens
        layers += one.kind in (OperatorKind.NON_EXPERT, OperatorKind.LAYER)
    if experts:
        each = sum(one.parameters for one in experts) / len(experts)
        products += gates * 2.0 * each * tokens * job.experts_per_token
    # Scores and their product with the values, half of them masked, over tensor parallelism.
    scores = 2 * 2.0 * tokens * job.seq_length * job.hidden_size / 2 / job.tensor_parallel * layers
    seconds = (products + scores) / (cluster.flops * cluster.utilization)
    if job.expert_parallel > 1 and gates:
        sent = tokens * job.experts_per_token * job.hidden_size * ELEMENT_BYTES * (1 - 1 / job.expert_parallel)
        inside = job.expert_parallel * job.tensor_parallel <= cluster.gpus_per_node
        rate = cluster.link_bytes_per_s if inside else cluster.network_bytes_per_s / cluster.gpus_per_node
        seconds += gates * 2 * sent / rate  # there and back
    return seconds


def _sync_s(stage: StageShape, cluster: Cluster, job: JobShape) -> float:
    nbytes = sum(
        one.parameters * (GRADIENT_BYTES + ELEMENT_BYTES) * (1 - 1 / one.shards)
        for one in stage.operators
        if one.shards > 1
    )
    inside = job.ranks // job.pipeline_parallel <= cluster.gpus_per_node
    assert cluster.link_bytes_per_s is not None
    return nbytes / (cluster.link_bytes_per_s if inside else cluster.network_bytes_per_s / cluster.gpus_per_node)


def _update_s(stage: StageShape, cluster: Cluster, job: JobShape) -> float:
    """Reads and writes all state once; bound by the GPU's memory."""
    full = int(stage.table(job.regime).full.sum())
    return 2 * full / cluster.memory_bytes_per_s if cluster.memory_bytes_per_s else 0.0


def _on_nodes(pipeline: Pipeline, job: JobShape, cluster: Cluster) -> list[Pipeline]:
    """The pipelines of all data-parallel replicas, those alike once: a stage is as slow as its slowest node there."""
    if not cluster.speeds:
        return [pipeline]
    of_stage = job.ranks // job.pipeline_parallel
    of_replica = of_stage // job.data_parallel
    different = set()
    for replica in range(job.data_parallel):
        different.add(
            tuple(
                min(
                    cluster.speed_of((stage * of_stage + replica * of_replica + one) // cluster.gpus_per_node)
                    for one in range(of_replica)
                )
                for stage in range(job.pipeline_parallel)
            )
        )
    return [slowed(pipeline, speeds) for speeds in sorted(different)]


def slowed(pipeline: Pipeline, speeds: tuple[float, ...]) -> Pipeline:
    """Return a pipeline whose stages run at a fraction of their speed."""
    return replace(
        pipeline,
        forward_s=tuple(one / speed for one, speed in zip(pipeline.forward_s, speeds, strict=True)),
        backward_s=tuple(one / speed for one, speed in zip(pipeline.backward_s, speeds, strict=True)),
    )
