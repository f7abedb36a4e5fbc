"""Testbed and models of Lazarus's evaluation (section 6.1), as jobs of the simulator, with recorded loads.

Nodes, slots, models, intervals and the bytes of an expert are published. These values are not, and follow from others:

- Seconds of an iteration: Lazarus trains 2,926 steps of GPT-S and 1,996 of GPT-L in figure 6, and 45 samples a second of
  GPT-M on ten nodes (section 6.2). The values below make the simulation arrive at these numbers.
- Seconds of a checkpoint: 14 bytes a parameter, as the published bytes of an expert imply, at the file server's 10 Gb/s.

Assumed: a restart takes 120 s, and experts take half of an iteration.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from moevement_core.simulator.elastic import ElasticJob, System, most_loaded

Tokens = npt.NDArray[np.int64]

NODES, SLOTS, FLOOR = 10, 6, 2
"""Number of nodes, slots per node, and minimum replicas of an expert."""
MODELS = {"GPT-S": 8, "GPT-M": 12, "GPT-L": 16}
"""Number of experts of each layer, by model."""
RECORD_EVERY = 10
"""Iterations between two records of the recorded loads."""
SAMPLES_OF_NODE = 4
"""Sequences of a node in an iteration; Lazarus trains with a constant batch on each GPU, and a GPU stands for a node."""
EXPERT_BYTES = {"GPT-S": 63e6, "GPT-M": 112e6, "GPT-L": 112e6}
"""Bytes of weights and optimizer state of an expert (section 6.3); GPT-M has the feature dimension of GPT-L."""
ITERATION_S = {"GPT-S": 0.535, "GPT-M": 0.81, "GPT-L": 0.655}
PARAMETERS = {"GPT-S": 521e6, "GPT-M": 1.3e9, "GPT-L": 1.7e9}
STATE_BYTES, STORAGE_BYTES_PER_S = 14, 1.25e9
"""Bytes of state of a parameter, and bytes per second of the file server."""
CHECKPOINT_EVERY = {System.LAZARUS: 250, System.REGROUP: 250, System.RESTART: 50}
"""Iterations between two checkpoints (sections 6.1 and 6.4)."""


def job_of(model: str, system: System, *, every: float = 1.0, saves: bool = True) -> ElasticJob:
    """Return the job of a model on the testbed.

    Args:
        model: name of the model.
        system: system that trains it.
        every: multiple of the published iterations between two checkpoints.
        saves: False if Lazarus saves no checkpoints. The baselines always save.
    """
    checkpoint_every = CHECKPOINT_EVERY[system] * every if saves or system is not System.LAZARUS else math.inf
    return ElasticJob(
        experts=MODELS[model], slots=SLOTS, floor=FLOOR, iteration_s=ITERATION_S[model], nodes=NODES,
        expert_bytes=EXPERT_BYTES[model], checkpoint_s=PARAMETERS[model] * STATE_BYTES / STORAGE_BYTES_PER_S,
        checkpoint_every=checkpoint_every, is_batch_per_node=True,
    )  # fmt: skip


def loads_of(model: str, tokens: Tokens) -> Tokens:
    """Return loads for every layer of a model, ``[records, 12, E]``: those of every other layer of the record."""
    return most_loaded(tokens, MODELS[model])[:, ::2]


def loads_at(tokens: Tokens, iterations: npt.NDArray[np.int64], step: int, experts: int) -> Tokens:
    """Return the loads of the most loaded experts of every layer at a step, ``[layers, E]``.

    The paper cuts the record to the size of its models in the same way.
    """
    at = int(np.searchsorted(iterations, step))
    return -np.sort(-tokens[at], axis=-1)[:, :experts]


def routed(tokens: int, experts: int, ratio: float) -> list[int]:
    """Return the tokens of each expert: the first gets ``ratio`` times its even share, the others share the rest.

    Raises:
        ValueError: the first expert would get more than all tokens.
    """
    if not 0 <= ratio <= experts:
        raise ValueError(f"load ratio {ratio:g} with {experts} experts; needs 0 to {experts}")
    popular = round(tokens * ratio / experts)
    each, more = divmod(tokens - popular, experts - 1)
    return [popular, *(each + (number < more) for number in range(experts - 1))]
