"""Experts in slots, as the flags ask for them."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron.moevement.elastic.meeting import Meeting
from megatron.moevement.elastic.pieces import Stand
from megatron.moevement.elastic.slots import Slots, Table, slots, use_slots
from moevement_core.elastic.config import ElasticConfig
from moevement_core.errors import ConfigError
from moevement_core.flags import from_args
from moevement_core.run_record import RunRecord
from moevement_core.session.exchange import all_gather_objects


def put_experts_in_slots(args: Namespace) -> None:
    """Build layers with slots from now on, and let expert parallelism span all replicas, if the flags say so.

    Called when Megatron has validated its arguments, before it makes its configuration objects from them.
    """
    config = from_args(ElasticConfig, args)
    use_slots(None)
    if config.expert_slots is not None:
        args.expert_model_parallel_size = args.data_parallel_size
        use_slots(Slots(args.num_experts, config.expert_slots, config.min_replicas))


def begin_placement(args: Namespace, *, is_restart: bool) -> None:
    """Place experts at a start of the job: by ``--moevement-expert-placement``, or as if all had equal loads.

    Args:
        args: Megatron's.
        is_restart: whether the job has begun before, maybe with more ranks than now: the placement was for those.
    """
    its = slots()
    if its is not None:
        its.tables.clear()
        if args.moevement_expert_placement and not is_restart:
            its.tables.update(read_placement(args.moevement_expert_placement, its, args.data_parallel_size))


def place_experts(meeting: Meeting) -> dict[int, list[int]]:
    """Place experts for the current ranks, by what they bring; after a failure, or when loads ask for it.

    Returns:
        The loads by which it was done, by layer of this rank's stage; nothing without slots.
    """
    its = slots()
    if its is None:
        return {}
    from megatron.core import parallel_state

    stand = Stand.now()
    here = range(stand.world)[stand.rank - stand.expert :][: parallel_state.get_expert_model_parallel_world_size()]
    of_stage = [one for one in meeting.held if one.stand is not None and one.stand.stage == stand.stage]
    layers = sorted({layer for one in of_stage for layer in one.experts})
    loads = {layer: list(its_) for one in of_stage[:1] for layer, its_ in one.loads.items()}
    held = [meeting.held[rank] for rank in here]
    its.tables.clear()
    its.place(layers, loads, {rank: one.experts if one in of_stage else {} for rank, one in enumerate(held)})
    return loads


def record_placement(record: RunRecord | None, iteration: int) -> None:
    """Write the placement of now to the run's ``placements/``; every rank calls it, and who has the record writes.

    Args:
        record: of the run, on one rank.
        iteration: after which it holds.
    """
    its = slots()
    if its is None:
        return
    tables: dict[int, Table] = {}
    for stage in all_gather_objects(its.tables, dict[int, Table]):
        tables.update(stage)
    if record is not None:
        layers = {str(layer): table for layer, table in sorted(tables.items())}
        record.write_placement(iteration, {"iteration": iteration, "layers": layers})


def read_placement(file: str, its: Slots, ranks: int) -> dict[int, Table]:
    """The table of each layer.

    Raises:
        ConfigError: it cannot be read, or is of another number of ranks, slots or experts.
    """
    flag = f"--moevement-expert-placement {file}"
    try:
        layers: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))["layers"]
        tables = {int(layer): tuple(tuple(map(int, one)) for one in table) for layer, table in layers.items()}
    except OSError as error:
        raise ConfigError(f"{flag}: {error.strerror}; give a file that an elastic job wrote to placements/") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{flag}: no placement ({error!r}); give a file that an elastic job wrote") from None
    for layer, table in tables.items():
        found = {len(its) for its in table}
        if len(table) != ranks or found != {its.of_rank}:
            raise ConfigError(
                f"{flag}: layer {layer} has {len(table)} ranks of {sorted(found)} slots; the job has {ranks} "
                f"data-parallel ranks of {its.of_rank}"
            )
        if {expert for its_ in table for expert in its_} != set(range(its.experts)):
            raise ConfigError(f"{flag}: layer {layer} does not hold each of experts 0 to {its.experts - 1}")
    return tables
