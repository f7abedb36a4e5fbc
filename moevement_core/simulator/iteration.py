"""Seconds of an iteration: pipelines, exposed gradient synchronisation, and the update (MoEvement, appendix C)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from moevement_core.errors import ConfigError
from moevement_core.operators import OperatorKind
from moevement_core.planning.cluster import Cluster
from moevement_core.planning.job import JobShape, StageShape
from moevement_core.planning.profile import Profile, SizeProfile
from moevement_core.simulator.pipeline import SimulatedPipeline

BACKWARD_OVER_FORWARD = 2.0
"""Work of the backward pass, divided by that of the forward pass, which has half as many matrix products."""
ELEMENT_BYTES = 2
"""Bytes of an element of activations and of gathered parameters."""
GRADIENT_BYTES = 4
"""Bytes of an element of gradients, which Megatron reduces in FP32."""


@dataclass(frozen=True)
class IterationTime:
    """Seconds of an iteration, by part. Their sum is ``max(T_pipeline) + T_sync + T_update``."""

    pipelines: tuple[SimulatedPipeline, ...]
    """Pipelines of the data-parallel replicas. Replicas with equal times have one entry together."""
    sync_s: float = 0.0
    """Seconds of gradient reduction and parameter gathering that do not overlap with computation."""
    update_s: float = 0.0
    ranks_of_stage: int = 1
    cores: int = 0
    """Number of processors that all ranks shared when the seconds were measured; 0 if each rank has its own device."""

    @cached_property
    def total_s(self) -> float:
        """Seconds of an iteration by event simulation of the slowest pipeline."""
        return max(pipeline.simulate() for pipeline in self.pipelines) + self.sync_s + self.update_s

    @property
    def stages(self) -> int:
        """Number of pipeline stages, S."""
        return self.pipelines[0].stages

    def segment_s(self, segment: Iterable[int]) -> float:
        """Return the seconds that neighbouring stages need to replay an iteration from logs, while other stages wait.

        A single stage has no pipeline bubble. N stages have the bubble of a pipeline of N stages. If ranks share
        processors, ranks that wait leave the processors to ranks that replay.
        """
        stages = sorted(segment)
        seconds = max(pipeline.part(stages).simulate() for pipeline in self.pipelines) + self.sync_s + self.update_s
        return seconds * self._crowd(len(stages)) / self._crowd(self.stages)

    def _crowd(self, stages: int) -> float:
        """Return how many times slower ``stages`` stages run because their ranks share processors."""
        return max(1.0, stages * self.ranks_of_stage / self.cores) if self.cores else 1.0

    def scaled(self, factor: float) -> IterationTime:
        """Return this time with all seconds multiplied by ``factor``."""
        return replace(
            self,
            pipelines=tuple(
                replace(
                    pipeline,
                    forward_s=tuple(factor * seconds for seconds in pipeline.forward_s),
                    backward_s=tuple(factor * seconds for seconds in pipeline.backward_s),
                    send_s=factor * pipeline.send_s,
                )
                for pipeline in self.pipelines
            ),
            sync_s=factor * self.sync_s,
            update_s=factor * self.update_s,
        )


def from_total(iteration_s: float, job: JobShape) -> IterationTime:
    """Return the parts of an iteration of ``iteration_s`` seconds, if all stages are equal and only passes take time.

    Forward passes get a third of the seconds, and backward passes two thirds.
    """
    stages, count = job.pipeline_parallel, job.micro_batches
    each = iteration_s / (count + (stages - 1) / job.chunks)
    return IterationTime((_even(stages, count, job.chunks, each),))


def _even(stages: int, micro_batches: int, chunks: int, each: float) -> SimulatedPipeline:
    forward = each / (1 + BACKWARD_OVER_FORWARD)
    return SimulatedPipeline((forward,) * stages, (each - forward,) * stages, micro_batches, chunks)


def from_profile(profile: Profile, job: JobShape) -> IterationTime:
    """Return the iteration time of a job from a profile of a run.

    The job may have more or fewer micro-batches and ranks than the profiled run. The measured collectives then predict
    the seconds of synchronisation (appendix C). If the job has as many micro-batches and ranks as the profiled run, the
    function scales all seconds so that they add up to the measured iteration.

    Raises:
        ConfigError: the profiled run had another pipeline, or did not measure the job's size of micro-batches.
    """
    by_tokens = {size.tokens: size for size in profile.sizes}
    if (profile.pipeline, profile.chunks) != (job.pipeline_parallel, job.chunks) or job.tokens not in by_tokens:
        sizes = ", ".join(map(str, sorted(by_tokens)))
        raise ConfigError(
            f"the profile was measured with {profile.pipeline} stages, {profile.chunks} chunks and micro-batches of "
            f"{sizes} tokens; the job has {job.pipeline_parallel} stages, {job.chunks} chunks and micro-batches of "
            f"{job.tokens} tokens; measure a profile of this job"
        )
    size = by_tokens[job.tokens]
    forward, backward = (tuple(getattr(stage, name) for stage in size.stages) for name in ("forward_s", "backward_s"))
    pipeline = SimulatedPipeline(
        forward_s=forward, backward_s=backward, micro_batches=job.micro_batches, chunks=job.chunks, send_s=size.send_s
    )
    of_stage = job.ranks_of_stage
    time = IterationTime(
        pipelines=(pipeline,),
        sync_s=_profiled_sync_s(profile, size, of_stage),
        update_s=size.update_s,
        ranks_of_stage=of_stage,
        cores=profile.cores,
    )
    if (job.ranks, job.micro_batches) != (profile.ranks, size.micro_batches):
        return time
    return time.scaled(size.iteration_s / time.total_s)


def _profiled_sync_s(profile: Profile, size: SizeProfile, ranks: int) -> float:
    """Return the seconds for which training waits for synchronisation, if a stage has ``ranks`` ranks.

    The function assumes that computation hides the same share of synchronisation as in the profiled run.
    """
    measured_s, wanted_s = (_synchronised_s(profile, size, each) for each in (profile.ranks_of_stage, ranks))
    if not measured_s:  # the profiled run had one rank for each stage, or no collective was measured
        return size.sync_s + wanted_s
    return size.sync_s * wanted_s / measured_s


def _synchronised_s(profile: Profile, size: SizeProfile, ranks: int) -> float:
    """Return the seconds that ``ranks`` ranks need to reduce gradients and gather parameters of the largest stage.

    Return 0.0 for a single rank, or if the collectives were not measured.
    """
    reduce, gather = (profile.fit(name, ranks) for name in ("reduce_scatter", "all_gather"))
    if reduce is None or gather is None:
        return 0.0
    most = max(stage.parameters for stage in size.stages)
    return reduce.seconds(GRADIENT_BYTES * most) + gather.seconds(ELEMENT_BYTES * most)


def from_machines(job: JobShape, cluster: Cluster) -> IterationTime:
    """Return the iteration time of a job, estimated from its FLOP and bytes and from the rates of the cluster.

    The estimate adds up matrix products at the GPU's rate, all-to-all, sends, synchronisation and the update. It counts
    attention scores, but neither embedding nor norms. All-to-all uses NVLink if the expert-parallel ranks of a stage
    share a node; otherwise it uses the network. Synchronisation among n ranks moves ``(n - 1) / n`` of the bytes of
    gradients (FP32) and parameters (16 bits). Computation hides the share ``cluster.overlap`` of synchronisation.

    Raises:
        ConfigError: the rates of the GPUs or the number of tokens in a micro-batch are not known.
    """
    if cluster.flops is None or cluster.link_bytes_per_s is None:
        raise ConfigError(
            "the seconds of an iteration are not known; give --iteration-time, a profile, or tflops and nvlink of the "
            "cluster"
        )
    if not job.tokens:
        raise ConfigError(f"job {job.name} has no number of tokens in a micro-batch; give the iteration time")
    forward = tuple(_forward_s(job, stage, cluster) for stage in job.stages)
    pipeline = SimulatedPipeline(
        forward_s=forward,
        backward_s=tuple(BACKWARD_OVER_FORWARD * seconds for seconds in forward),
        micro_batches=job.micro_batches,
        chunks=job.chunks,
        send_s=job.boundary_bytes / (cluster.network_bytes_per_s / cluster.gpus_per_node),
    )
    exposed = max(_sync_s(stage, cluster, job) for stage in job.stages) * (1 - cluster.overlap)
    update = max(_update_s(stage, cluster, job) for stage in job.stages)
    return IterationTime(tuple(_on_nodes(pipeline, job, cluster)), exposed, update)


def _forward_s(job: JobShape, stage: StageShape, cluster: Cluster) -> float:
    """Return the seconds of the forward pass of a micro-batch on a stage, all-to-all included."""
    assert cluster.flops is not None
    assert cluster.link_bytes_per_s is not None
    tokens, products, layers = job.tokens, 0.0, 0
    experts = [operator for operator in stage.operators if operator.kind is OperatorKind.EXPERT]
    gates = sum(operator.kind is OperatorKind.GATE for operator in stage.operators)
    for operator in stage.operators:
        if operator.kind in (OperatorKind.NON_EXPERT, OperatorKind.GATE, OperatorKind.HEAD, OperatorKind.LAYER):
            products += 2.0 * operator.parameters * tokens
        layers += operator.kind in (OperatorKind.NON_EXPERT, OperatorKind.LAYER)
    if experts:
        each = sum(operator.parameters for operator in experts) / len(experts)
        products += gates * 2.0 * each * tokens * job.experts_per_token
    # Attention scores and their product with the values: half is masked, and tensor-parallel ranks share the rest.
    scores = 2 * 2.0 * tokens * job.seq_length * job.hidden_size / 2 / job.tensor_parallel * layers
    seconds = (products + scores) / (cluster.flops * cluster.utilization)
    if job.expert_parallel > 1 and gates:
        sent = tokens * job.experts_per_token * job.hidden_size * ELEMENT_BYTES * (1 - 1 / job.expert_parallel)
        inside = job.expert_parallel * job.tensor_parallel <= cluster.gpus_per_node
        rate = cluster.link_bytes_per_s if inside else cluster.network_bytes_per_s / cluster.gpus_per_node
        seconds += gates * 2 * sent / rate  # to the experts and back
    return seconds


def _sync_s(stage: StageShape, cluster: Cluster, job: JobShape) -> float:
    nbytes = sum(
        operator.parameters * (GRADIENT_BYTES + ELEMENT_BYTES) * (1 - 1 / operator.shards)
        for operator in stage.operators
        if operator.shards > 1
    )
    inside = job.ranks_of_stage <= cluster.gpus_per_node
    assert cluster.link_bytes_per_s is not None
    return nbytes / (cluster.link_bytes_per_s if inside else cluster.network_bytes_per_s / cluster.gpus_per_node)


def _update_s(stage: StageShape, cluster: Cluster, job: JobShape) -> float:
    """Return the seconds of an update: it reads and writes all state of a rank once, in the memory of the GPU."""
    full = int(stage.table(job.regime).full.sum())
    return 2 * full / cluster.memory_bytes_per_s if cluster.memory_bytes_per_s else 0.0


def _on_nodes(pipeline: SimulatedPipeline, job: JobShape, cluster: Cluster) -> list[SimulatedPipeline]:
    """Return the pipelines of the data-parallel replicas, on nodes with different speeds; equal pipelines count once.

    A stage of a replica is as slow as the slowest node that holds one of its ranks.
    """
    if not cluster.speeds:
        return [pipeline]
    of_stage = job.ranks_of_stage
    of_replica = of_stage // job.data_parallel
    different = set()
    for replica in range(job.data_parallel):
        different.add(
            tuple(
                min(
                    cluster.speed_of((stage * of_stage + replica * of_replica + rank) // cluster.gpus_per_node)
                    for rank in range(of_replica)
                )
                for stage in range(job.pipeline_parallel)
            )
        )
    return [slowed(pipeline, speeds) for speeds in sorted(different)]


def slowed(pipeline: SimulatedPipeline, speeds: tuple[float, ...]) -> SimulatedPipeline:
    """Return the pipeline with the seconds of each stage divided by the relative speed of the stage in ``speeds``."""
    return replace(
        pipeline,
        forward_s=tuple(seconds / speed for seconds, speed in zip(pipeline.forward_s, speeds, strict=True)),
        backward_s=tuple(seconds / speed for seconds, speed in zip(pipeline.backward_s, speeds, strict=True)),
    )
