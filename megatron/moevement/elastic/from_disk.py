"""Loading of a window on disk by an elastic job that has another number of ranks than the job that wrote the window."""

from __future__ import annotations

from argparse import Namespace

from megatron.moevement.binding import MegatronBinding
from megatron.moevement.elastic.formation import Formation, FormationSnapshots
from megatron.moevement.elastic.pieces import RankPosition
from megatron.moevement.elastic.rebuild import prepare_from_snapshots
from megatron.moevement.elastic.slots import slots
from megatron.moevement.runtime.live import Live
from moevement_core.rebuild.prepare import Prepared
from moevement_core.saving.window_files import Resize, WindowFiles
from moevement_core.storage.manifest import Manifest


def resize_of(args: Namespace, binding: MegatronBinding, live: Live) -> Resize | None:
    """Return the object that loads a window of a job with another number of ranks; None if this job is not elastic.

    Args:
        args: Megatron's arguments.
        binding: binding of this rank.
        live: Megatron's objects, with the model that was just built.
    """
    if not args.moevement_elastic:
        return None

    def is_needed(manifest: Manifest) -> bool:
        """Return True if the window's snapshots have to be divided anew among the ranks of this job.

        With expert slots this is always necessary, because each rank may have held other experts when the window was
        written.
        """
        return slots() is not None or manifest.settings.get("world_size") != args.world_size

    def prepare(files: WindowFiles, manifest: Manifest) -> Prepared:
        stands = tuple(RankPosition.of(manifest.settings, rank) for rank in range(manifest.settings["world_size"]))
        held = FormationSnapshots(
            Formation(-1, stands),
            -1,
            files.holdings(),
            lambda holding: files.open(holding.source, holding.owner, holding.iteration),
        )
        rebuilt = prepare_from_snapshots(
            [held], binding.states(), live.optimizer, RankPosition.now(), until=manifest.reaches, is_verified=True
        )
        return rebuilt.prepared

    free = {"world_size", *(() if slots() is None else ("expert_model_parallel_size",))}
    return Resize(free, is_needed, prepare)
