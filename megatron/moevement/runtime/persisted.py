"""Windows on disk in a Megatron job: where each rank writes, and what a new job starts from."""

from __future__ import annotations

import functools
import os
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.moevement.runtime.boundary import put_progress
from megatron.moevement.runtime.job import Job
from megatron.moevement.runtime.ranks import tell_all
from megatron.moevement.runtime.recovery import Prepared, prepare
from megatron.moevement.sparse_config import SparseConfig
from moevement_core.errors import ConfigError, FolderInUse, RecoveryError, SnapshotError
from moevement_core.persistence.bounded import within
from moevement_core.persistence.files import file_name, owner_and_iteration, read_header, read_snapshot
from moevement_core.persistence.lock import STALE_S, FolderLock, acquire
from moevement_core.persistence.manifest import Manifest, is_of_job, manifests
from moevement_core.recovery.plan import Holding, Report, Source
from moevement_core.replication.transport import GlooTransport, Transport
from moevement_core.snapshot.snapshot import Snapshot

NODE = "{node}"
"""In a folder's name: this rank's node."""

SETTINGS = (
    "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "context_parallel_size", "sequence_parallel",
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "num_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_topk", "moe_shared_expert_intermediate_size",
    "mtp_num_layers", "multi_latent_attention", "add_bias_linear", "padded_vocab_size", "normalization", "swiglu",
    "position_embedding_type", "max_position_embeddings", "untie_embeddings_and_output_weights", "transformer_impl",
    "seq_length", "micro_batch_size", "global_batch_size", "rampup_batch_size", "dataloader_type", "seed",
    "hidden_dropout", "attention_dropout", "fp16", "bf16", "fp8", "optimizer", "use_distributed_optimizer",
    "accumulate_allreduce_grads_in_fp32", "lr", "min_lr", "lr_decay_style", "weight_decay", "clip_grad", "adam_beta1",
    "adam_beta2", "adam_eps", "decoupled_lr", "moe_router_score_function", "moe_router_load_balancing_type",
    "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps", "moe_expert_capacity_factor",
    "moe_token_drop_policy", "moe_pad_expert_input_to_capacity", "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate", "moe_router_dtype", "moe_router_group_topk", "moe_token_dispatcher_type",
    "calculate_per_token_loss", "iterations_to_skip",
)  # fmt: skip
"""Flags that the replayed iterations depend on: the job that loads a window has the same."""


def settings_of(args: Namespace) -> dict[str, Any]:
    """What the manifest says of this job."""
    settings = {name: _plain(getattr(args, name, None)) for name in SETTINGS}
    if not getattr(args, "group_query_attention", False):
        settings["num_query_groups"] = args.num_attention_heads  # as Megatron sets it when it first counts FLOP
    return settings


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


@dataclass(frozen=True)
class Place:
    """The folder of this rank, and who shares it."""

    folder: Path
    members: tuple[int, ...]
    """All ranks that see the same folder."""

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the folder."""
        return dist.get_rank() == self.members[0]

    @property
    def is_shared_by_all(self) -> bool:
        """One folder for the whole job: every file in it is there for every rank."""
        return len(self.members) == dist.get_world_size()


def _folder(template: str, node: str) -> Path:
    return Path(template.replace(NODE, node)).resolve()


START_PATIENCE_S = 60.0
"""How long the disk may take to answer when a job starts."""
RECOVERY_PATIENCE_S = 2.0
"""How long later on, when training waits for it: windows on disk are not worth more of its time."""


def find_place(flag: str, template: str, node: str, patience_s: float) -> Place:
    """Make the folder and find out who else sees it; every rank calls it.

    Args:
        flag: what the user gave the folder by.
        template: its name, maybe with :data:`NODE` in it.
        node: this rank's.
        patience_s: how long to wait for the disk, twice.

    Raises:
        ConfigError: it cannot be made, or written, or does not answer, on some rank. On every rank.
    """
    mark = f".seen-by-{uuid.uuid4().hex}"
    folder, is_made = Path(template), False
    complaint, seen = None, list[int]()
    try:
        try:
            folder, is_made = within(patience_s, lambda: _make_folder(template, node, mark)), True
        except OSError as error:
            complaint = f"{flag} {template}: {error.strerror}; give a folder that every rank can write"
        marks = [name for _, name in _tell_or_refuse((complaint, mark))]
        try:
            seen = within(patience_s, lambda: _which_are_there(folder, marks))
        except OSError as error:
            complaint = f"{flag} {folder}: {error.strerror}; give a folder that every rank can read"
        _tell_or_refuse((complaint, mark))
    finally:
        if is_made:
            with suppress(OSError):
                within(patience_s, (folder / mark).unlink)
    return Place(folder, tuple(seen))


def _which_are_there(folder: Path, names: Sequence[str]) -> list[int]:
    return [number for number, name in enumerate(names) if (folder / name).exists()]


def _make_folder(template: str, node: str, mark: str) -> Path:
    folder = _folder(template, node)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / mark).touch()
    return folder


def _tell_or_refuse(mine: tuple[str | None, str]) -> list[tuple[str | None, str]]:
    """What every rank says, if none of them complains; every rank calls it.

    Raises:
        ConfigError: the first complaint. On every rank.
    """
    everyones = tell_all(mine)
    if complaint := next((text for text, _ in everyones if text), None):
        raise ConfigError(complaint)
    return everyones


def lock_place(
    flag: str, place: Place, job: str, held: FolderLock | None, patience_s: float, *, may_wait: bool
) -> FolderLock | None:
    """Take every folder for this job, by its first rank; every rank calls it.

    Args:
        flag: what the user gave the folder by.
        place: this rank's.
        job: the job's name.
        held: what this rank holds from before, if it does.
        patience_s: how long to wait for the disk.
        may_wait: whether to see whether another job's holder lives; see :func:`acquire`.

    Returns:
        The lock, on the first rank of a folder.

    Raises:
        FolderInUse: another job has a folder. On every rank.
        ConfigError: the lock cannot be written on some rank. On every rank.
    """
    lock: FolderLock | None = None
    complaint: ConfigError | None = None
    try:
        if place.is_first and held is not None and held.folder == place.folder and held.lost is None:
            lock = held
        elif place.is_first:
            taking = functools.partial(acquire, place.folder, job, flag, may_wait=may_wait, report=_say)
            lock = within(patience_s + (2 * STALE_S if may_wait else 0.0), taking)
    except FolderInUse as error:
        complaint = error
    except OSError as error:
        complaint = ConfigError(f"{flag} {place.folder}: {error.strerror}; give a folder that every rank can write")
    if refused := next((error for error in tell_all(complaint) if error), None):
        raise refused
    return lock


def _say(text: str) -> None:
    print(f"moevement: {text}", flush=True)


def refuse_foreign_windows(place: Place, load: str | None, node: str) -> None:
    """A job that was not told to go on from there does not overwrite what another one has saved; every rank calls it.

    Args:
        place: where this job is to write.
        load: where it was told to look for windows, whether it found one or not.
        node: this rank's.

    Raises:
        ConfigError: there are windows that this job was not asked to load.
    """
    same = load is not None and _folder(load, node) == place.folder
    found = None if same else next(iter(manifests(place.folder)), None)
    told = [name for name in tell_all(f"{place.folder}/{found.name}" if found else None) if name]
    if told:
        raise ConfigError(
            f"--moevement-persist-dir: {told[0]} is of another run; go on from it with --moevement-load and the same "
            "folder, or give an empty one"
        )


class FileShelf:
    """The files of one window: this rank's own, and, on the first rank of a folder, copies for ranks elsewhere."""

    def __init__(self, place: Place, manifest: Manifest) -> None:
        self._folder = place.folder / manifest.name
        self._place = place
        self._range = range(manifest.first, manifest.last + 1)

    def has(self, iteration: int) -> bool:
        """Whether ``SS_iteration`` belongs to the window."""
        return iteration in self._range

    def holdings(self) -> list[Holding]:
        """All that are there and look whole."""
        return list(self._holdings())

    def _holdings(self) -> Iterator[Holding]:
        for name in sorted(os.listdir(self._folder)) if self._folder.is_dir() else ():
            found = owner_and_iteration(name)
            if found is None or found[1] not in self._range or not self._is_mine_to_tell(found[0]):
                continue
            try:
                header = read_header(self._folder / name)
            except SnapshotError as error:
                print(f"moevement: {error}", flush=True)
                continue
            if (header.rank, header.iteration) == found:
                yield Holding(
                    header.rank, header.iteration, header.state, header.schedule, header.contents, Source.FILE
                )

    def _is_mine_to_tell(self, owner: int) -> bool:
        return owner == dist.get_rank() or (self._place.is_first and owner not in self._place.members)

    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        """One of them, not yet checked; nothing if it cannot be read."""
        try:
            return read_snapshot(self._folder / file_name(owner, iteration))
        except SnapshotError as error:
            print(f"moevement: {error}", flush=True)
            return None


class JobWindows:
    """The files of several windows of one start of a job, as one shelf.

    Args:
        place: this rank's folder.
        windows: the newest first.
    """

    def __init__(self, place: Place, windows: Sequence[Manifest]) -> None:
        self.windows = windows
        self._shelves = [FileShelf(place, manifest) for manifest in windows]

    def holdings(self) -> list[Holding]:
        """All that are there and look whole; a snapshot that belongs to two windows is told of once."""
        found = {(held.owner, held.iteration): held for shelf in self._shelves for held in shelf.holdings()}
        return list(found.values())

    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        """One of them, not yet checked; nothing if it cannot be read."""
        shelves = (shelf for shelf in self._shelves if shelf.has(iteration))
        return next((held for shelf in shelves if (held := shelf.open(source, owner, iteration)) is not None), None)


@dataclass(frozen=True)
class Loaded:
    """A window in host memory, ready to be replayed."""

    prepared: Prepared
    manifest: Manifest
    folder: Path

    @property
    def place(self) -> str:
        """Which one, in words."""
        return f"{self.manifest.name} in {self.folder}"


def load_into(job: Job, config: SparseConfig, *, is_resumed: bool) -> Loaded | None:
    """Find a window to start from and set the job to where it leads, before data is opened.

    The first start of a job looks where ``--moevement-load`` says. A restart looks where the job has written windows
    itself, and, unless there is one or a dense checkpoint of its own, where the first start has looked. Every rank
    calls it. The state itself comes later, inside Megatron's training loop: it has to be replayed.

    Args:
        job: this rank's.
        config: the flags.
        is_resumed: whether a dense checkpoint that the job has saved itself was loaded.

    Raises:
        ConfigError: the windows are of a job with other settings.
        RecoveryError: there are windows, and none of them is whole.
    """
    from megatron.core.num_microbatches_calculator import update_num_microbatches
    from megatron.training import get_args

    args = get_args()
    loaded = _load_own(job, config) if job.start != job.name else None
    if loaded is None and not is_resumed:
        loaded = _load_named(job, config)
    if loaded is None:
        return None
    put_progress(job, loaded.manifest.progress)
    args.iteration = loaded.manifest.reaches
    update_num_microbatches(args.consumed_train_samples, consistency_check=False)
    return loaded


def _load_own(job: Job, config: SparseConfig) -> Loaded | None:
    """The newest window that an earlier start of this job has written, where that can be had."""
    if config.persist_dir is None:
        return None
    node = config.node_of(dist.get_rank())
    try:
        place = find_place("--moevement-persist-dir", config.persist_dir, node, START_PATIENCE_S)
        return _load(place, lambda manifest: is_of_job(manifest.name, job.name))
    except (ConfigError, RecoveryError) as error:  # on every rank alike
        if dist.get_rank() == 0:
            _say(f"no window of this job can be used: {error}")
        return None


def _load_named(job: Job, config: SparseConfig) -> Loaded | None:
    """The newest window where ``--moevement-load`` says; own ones have been tried."""
    from megatron.training import get_args

    if config.load is None:
        return None
    rank, iteration = dist.get_rank(), get_args().iteration
    place = find_place("--moevement-load", config.load, config.node_of(rank), START_PATIENCE_S)
    loaded = _load(place, lambda manifest: not is_of_job(manifest.name, job.name))
    if loaded is None and rank == 0:
        began = f"iteration {iteration} of --load" if iteration else "fresh weights"
        _say(f"no newer window in --moevement-load {place.folder}: starting from {began}")
    return loaded


def _load(place: Place, is_wanted: Callable[[Manifest], bool]) -> Loaded | None:
    from megatron.core import parallel_state
    from megatron.training import get_args

    args = get_args()
    transport = GlooTransport() if dist.get_world_size() > 1 else None
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return load_newest(place, stage, settings_of(args), transport, is_wanted, after=args.iteration)


def load_newest(
    place: Place,
    stage: int,
    settings: Mapping[str, Any],
    transport: Transport | None,
    is_wanted: Callable[[Manifest], bool],
    after: int,
) -> Loaded | None:
    """The newest window of which every rank's snapshots can be had; every rank calls it.

    Args:
        place: where to look.
        stage: this rank's.
        settings: of this job.
        transport: between ranks.
        is_wanted: which windows to look at.
        after: a window that reaches no further than this iteration is of no use.

    Returns:
        Nothing if there is no window that reaches further.

    Raises:
        ConfigError: the newest window is of a job with other settings.
        RecoveryError: there are windows, and none of them is whole.
    """
    everyones = windows_of_all(place)
    candidates = [one for one in everyones if one.reaches > after and is_wanted(one)]
    refused = []
    for manifest in candidates:
        _refuse_other_settings(place, manifest, settings)
        shelf = FileShelf(place, manifest)
        try:
            reaches = manifest.reaches
            prepared = prepare(Report(dist.get_rank(), stage, ()), {Source.FILE: shelf}, reaches, transport)
            return Loaded(prepared, manifest, place.folder)
        except RecoveryError as error:
            refused.append(f"{manifest.name}: {error}")
            if dist.get_rank() == 0:
                print(f"moevement: {refused[-1]}", flush=True)
    if refused:
        raise RecoveryError(f"no window in {place.folder} is whole. {refused[0]}")
    return None


def windows_of_all(place: Place) -> list[Manifest]:
    """The windows that any rank sees in its folder, the newest first; every rank calls it."""
    everyones = {one.name: one for found in tell_all(manifests(place.folder)) for one in found}
    return sorted(everyones.values(), key=_newest, reverse=True)


def _newest(manifest: Manifest) -> tuple[int, str]:
    return manifest.reaches, manifest.job


def _refuse_other_settings(place: Place, manifest: Manifest, settings: Mapping[str, Any]) -> None:
    other = [name for name, value in settings.items() if name in manifest.settings and manifest.settings[name] != value]
    if other:
        found = "; ".join(
            f"--{name.replace('_', '-')} {settings[name]}, and {manifest.settings[name]} then" for name in other[:4]
        )
        raise ConfigError(
            f"--moevement-load {place.folder}: {manifest.name} is of a run with other settings ({found}); replayed "
            "iterations would not be those that were lost. Load it with the same flags, or a dense checkpoint (--load)"
        )
