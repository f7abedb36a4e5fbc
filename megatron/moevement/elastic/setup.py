"""Setup of expert slots from the flags of an elastic job, and the placement of experts in these slots."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.moevement.elastic.slots import Slots, slots, use_slots
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.elastic.config import SlotsConfig
from moevement_core.elastic.tables import StageExperts, Table
from moevement_core.errors import ConfigError
from moevement_core.restart.generation import nodes_of
from moevement_core.run.run_record import RunRecord
from moevement_core.session.resize import Offer
from moevement_core.util.flags import from_args


def put_experts_in_slots(args: Namespace) -> None:
    """Set up expert slots in this process if the flags ask for slots.

    Expert parallelism then spans all data-parallel replicas. The preflight calls this function after Megatron has
    validated its arguments, and before Megatron builds configuration objects from the arguments.
    """
    config = from_args(SlotsConfig, args)
    use_slots(None)
    if config.expert_slots is not None:
        args.expert_model_parallel_size = args.data_parallel_size
        use_slots(Slots(args.num_experts, config.expert_slots, config.min_replicas))


def begin_placement(args: Namespace, *, is_restart: bool) -> None:
    """Place experts at the start of a job, according to ``--moevement-expert-placement``.

    A layer that the flag's file does not place is placed later, as if all its experts had equal loads.

    Args:
        args: Megatron's arguments.
        is_restart: True if the job has started before. The flag is then ignored, because its placement was made for the
            number of ranks at the first start.
    """
    expert_slots = slots()
    if expert_slots is not None:
        expert_slots.tables.clear()
        if args.moevement_expert_placement and not is_restart:
            expert_slots.tables.update(
                read_placement(args.moevement_expert_placement, expert_slots, args.data_parallel_size)
            )


def place_experts(offers: Sequence[Offer]) -> dict[int, list[int]]:
    """Place experts in the slots of the present ranks, so that as few experts as possible move.

    Every rank calls it after a failure, and when uneven loads make experts move.

    Args:
        offers: what each present rank brings; the data is the result of ``MegatronRecut.offer``.

    Returns:
        The recent token counts of the experts in each layer of this rank's stage; empty without slots. The placement
        follows from these counts.
    """
    expert_slots = slots()
    if expert_slots is None:
        return {}
    from megatron.core import parallel_state

    ranks = parallel_state.get_expert_model_parallel_world_size()
    stages = [
        _stage_experts(offers, stage, range(stage * ranks, (stage + 1) * ranks), expert_slots.experts)
        for stage in range(parallel_state.get_pipeline_model_parallel_world_size())
    ]
    own = parallel_state.get_pipeline_model_parallel_rank()
    expert_slots.place(stages[own], [stage for number, stage in enumerate(stages) if number != own])
    loads: dict[int, Sequence[int]] = next((offer.data.value["loads"] for offer in offers if _was_in(offer, own)), {})
    return {layer: list(tokens) for layer, tokens in loads.items()}


def _was_in(offer: Offer, stage: int) -> bool:
    """Return True if a rank was in ``stage`` before the job changed its ranks."""
    return offer.layout is not None and offer.layout.stage == stage


def _stage_experts(offers: Sequence[Offer], stage: int, ranks: range, experts: int) -> StageExperts:
    """Return loads of the experts of ``stage``, and the experts that each present rank of the stage already holds.

    Args:
        offers: what each present rank brings.
        stage: pipeline stage.
        ranks: ranks that the stage has now.
        experts: number of experts in each layer. Without counted tokens, they all get equal loads.
    """
    of_stage = [offer.data.value for offer in offers if _was_in(offer, stage)]
    layers = sorted({layer for brought in of_stage for layer in brought["experts"]})
    counted = of_stage[0]["loads"] if of_stage else {}
    held = [offers[rank].data.value["experts"] if _was_in(offers[rank], stage) else {} for rank in ranks]
    return StageExperts(
        nodes=nodes_of(ranks),
        loads={layer: counted.get(layer, [1] * experts) for layer in layers},
        held={layer: [brought.get(layer, ()) for brought in held] for layer in layers},
    )


def record_placement(record: RunRecord | None, iteration: int) -> None:
    """Write the present placement to the run's ``placements/``. Collective.

    Args:
        record: record of the run on the rank that writes the record; None on all other ranks.
        iteration: iteration after which the placement is in use.
    """
    expert_slots = slots()
    if expert_slots is None:
        return
    tables: dict[int, Table] = {}
    for stage in all_gather_objects(expert_slots.tables, dict[int, Table]):
        tables.update(stage)
    if record is not None:
        layers = {str(layer): table for layer, table in sorted(tables.items())}
        record.write_placement(iteration, {"iteration": iteration, "layers": layers})


def read_placement(file: str, own_slots: Slots, ranks: int) -> dict[int, Table]:
    """Return the table of each layer (its expert in each slot) from a file that an elastic job wrote.

    Args:
        file: value of ``--moevement-expert-placement``.
        own_slots: slots of this process.
        ranks: data-parallel ranks of the job.

    Raises:
        ConfigError: the file is not readable, or does not fit the job's ranks, slots or experts.
    """
    flag = f"--moevement-expert-placement {file}"
    try:
        layers: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))["layers"]
        tables = {int(layer): tuple(tuple(map(int, row)) for row in table) for layer, table in layers.items()}
    except OSError as error:
        raise ConfigError(f"{flag}: {error.strerror}; give a file that an elastic job wrote to placements/") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{flag}: the file has no placement ({error!r}); give a file that an elastic job wrote to placements/"
        ) from None
    for layer, table in tables.items():
        sizes = {len(row) for row in table}
        if len(table) != ranks or sizes != {own_slots.of_rank}:
            raise ConfigError(
                f"{flag}: layer {layer} has {len(table)} ranks with {sorted(sizes)} slots; give a placement for "
                f"{ranks} data-parallel ranks and --moevement-expert-slots {own_slots.of_rank}"
            )
        if {expert for row in table for expert in row} != set(range(own_slots.experts)):
            raise ConfigError(
                f"{flag}: layer {layer} has missing or unknown experts; give a placement for experts 0 to "
                f"{own_slots.experts - 1}"
            )
    return tables
