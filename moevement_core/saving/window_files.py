"""Windows on disk as a source of snapshots, and the search for the newest one that a job can start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moevement_core import log
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.comms.transport import Transport
from moevement_core.elastic.layout import Formation
from moevement_core.errors import ConfigError, RecoveryError, SnapshotError
from moevement_core.rebuild.prepare import Prepared, prepare
from moevement_core.rebuild.recut import prepare_from_snapshots
from moevement_core.recovery.formation_snapshots import FormationSnapshots
from moevement_core.recovery.holdings import Holding, Source
from moevement_core.recovery.plan import Report
from moevement_core.recovery.sources import SnapshotSource
from moevement_core.saving.folder import SharedFolder
from moevement_core.snapshot.snapshot import Snapshot
from moevement_core.storage.files import file_name
from moevement_core.storage.folder_store import FolderStore
from moevement_core.storage.manifest import Manifest, newest_first, reach_of
from moevement_core.storage.store import WindowStore
from moevement_core.trainer.equal_bits import arithmetic_of_all, why_window_may_differ
from moevement_core.trainer.interface import BindingInterface


class WindowFiles(SnapshotSource):
    """Source of those snapshots of one window on disk that this rank reports to all ranks.

    Each rank reports the files with its own snapshots. The first rank of a folder also reports files in it whose owners
    use another folder.
    """

    def __init__(self, place: SharedFolder, manifest: Manifest) -> None:
        self._place, self._name = place, manifest.name
        self._range = range(manifest.first, manifest.last + 1)
        # An object store lists the objects of a window only for ranks of another layout, because such a list is long.
        self._has_same_ranks = manifest.settings.get("world_size") == dist.get_world_size()

    def has(self, iteration: int) -> bool:
        """Return True if ``SS_iteration`` belongs to the window."""
        return iteration in self._range

    def path_of(self, owner: int, iteration: int) -> Path | None:
        """Return the path of a snapshot's file; None in an object store."""
        store = self._place.store
        return store.path / self._name / file_name(owner, iteration) if isinstance(store, FolderStore) else None

    def holdings(self) -> list[Holding]:
        """Return the snapshots that this rank reports and whose files have an undamaged header."""
        place = self._place
        is_elsewhere = (lambda owner: owner not in place.members) if place.is_first else None
        if place.is_shared_by_all and self._has_same_ranks:
            is_elsewhere = None
        try:
            stored = place.store.stored(self._name, dist.get_rank(), is_elsewhere)
        except OSError as error:
            log.warning(f"{place.store}/{self._name}: {error.strerror}; ranks plan without its snapshots")
            return []
        return [
            Holding(
                owner=entry.owner,
                iteration=entry.iteration,
                state=entry.state,
                schedule=entry.schedule,
                contents=entry.contents,
                source=Source.FILE,
            )
            for entry in stored
            if entry.iteration in self._range
        ]

    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        """Return one snapshot; None if it cannot be read.

        Checks only the snapshot's record. The fetch checks the digests of its tensors.
        """
        try:
            snapshot = self._place.store.read(self._name, file_name(owner, iteration))
            snapshot.check_record()
            return snapshot
        except SnapshotError as error:
            log.warning(str(error))
            return None


class JobWindows(SnapshotSource):
    """Source of the snapshots in several windows on disk, all written by one start of a job.

    Args:
        place: folder of this rank.
        windows: manifests of the windows, the newest first.
    """

    def __init__(self, place: SharedFolder, windows: Sequence[Manifest]) -> None:
        self.windows = windows
        self._files = [WindowFiles(place, manifest) for manifest in windows]

    def path_of(self, owner: int, iteration: int) -> Path | None:
        """Return the path of a snapshot's file in the newest window that has it."""
        return next(window for window in self._files if window.has(iteration)).path_of(owner, iteration)

    def holdings(self) -> list[Holding]:
        """Return the snapshots of all windows; a snapshot that belongs to two windows appears once."""
        oldest_first = reversed(self._files)  # :meth:`open` reads the newest file of a snapshot
        holdings = {(held.owner, held.iteration): held for window in oldest_first for held in window.holdings()}
        return list(holdings.values())

    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        """Return one snapshot from the newest readable file; None if no file can be read.

        Checks only the snapshot's record. The fetch checks the digests of its tensors.
        """
        files = (window for window in self._files if window.has(iteration))
        return next((held for window in files if (held := window.open(source, owner, iteration)) is not None), None)


@dataclass(frozen=True)
class Loaded:
    """Window in host memory, ready to be replayed."""

    prepared: Prepared
    manifest: Manifest
    store: WindowStore

    @property
    def place(self) -> str:
        """Name and place of the window, in words."""
        return f"{self.manifest.name} in {self.store}"


def load_newest(
    place: SharedFolder,
    stage: int,
    settings: Mapping[str, Any],
    transport: Transport,
    is_wanted: Callable[[Manifest], bool],
    after: int,
    elastic: BindingInterface | None = None,
) -> Loaded | None:
    """Load the newest window that has all snapshots of every rank. Every rank calls it.

    Args:
        place: folder to search.
        stage: pipeline stage of this rank.
        settings: settings of this job.
        transport: channel over which ranks fetch snapshots from each other.
        is_wanted: function that returns True for windows to consider.
        after: iteration beyond which a window must reach.
        elastic: binding of this rank, to load windows of a job with another number of ranks too; None to refuse them.

    Returns:
        Window; None if no window reaches beyond ``after``.

    Raises:
        ConfigError: the newest window belongs to a job with other settings.
        RecoveryError: windows exist, but none of them is complete.
    """
    windows, unreadable = _windows_of_all(place)
    candidates = [window for window in windows if window.reaches > after and is_wanted(window)]
    refused, here = [], arithmetic_of_all()
    for manifest in candidates:
        if not manifest.is_sealed and dist.get_rank() == 0:
            log.warning(
                f"{manifest.name} in {place.store}: the manifest has no digest (version 1), so the job cannot detect "
                "edits of the manifest"
            )
        free = elastic.recut().free_settings if elastic is not None else ()
        _refuse_other_settings(place, manifest, {name: value for name, value in settings.items() if name not in free})
        files = WindowFiles(place, manifest)
        try:
            if elastic is not None and not elastic.recut().is_cut_alike(manifest.settings):
                prepared = _recut(files, manifest, elastic)
            else:
                report = Report(dist.get_rank(), stage, ())
                prepared = prepare(report, {Source.FILE: files}, manifest.reaches, transport)
            why = why_window_may_differ(manifest, here)
            prepared = replace(
                prepared, other_arithmetic=why, keeps_first=not why, other_data=manifest.other_data(settings)
            )
            return Loaded(prepared, manifest, place.store)
        except RecoveryError as error:
            refused.append(f"{manifest.name}: {error}")
            if dist.get_rank() == 0:
                log.warning(refused[-1])
    refused += [why for name, why in unreadable.items() if reach_of(name) > after]
    if refused:
        raise RecoveryError(f"no window in {place.store} is complete. {refused[0]}")
    return None


def _recut(files: WindowFiles, manifest: Manifest, binding: BindingInterface) -> Prepared:
    """Divide the state in a window anew among the present ranks. Collective.

    Raises:
        RecoveryError: the window is not complete. Every rank raises it.
    """
    recut = binding.recut()
    layouts = tuple(recut.layout_of(manifest.settings, rank) for rank in range(manifest.settings["world_size"]))
    held = FormationSnapshots(
        Formation(-1, layouts),
        -1,
        files.holdings(),
        lambda holding: files.open(holding.source, holding.owner, holding.iteration),
    )
    return prepare_from_snapshots([held], binding, until=manifest.reaches, is_verified=True).prepared


def windows_of_all(place: SharedFolder) -> list[Manifest]:
    """Return the windows that any rank sees in its place, the newest first. Every rank calls it.

    Raises:
        ConfigError: an object store does not list its windows. Every rank raises it.
    """
    return _windows_of_all(place)[0]


def _windows_of_all(place: SharedFolder) -> tuple[list[Manifest], dict[str, str]]:
    """Return the windows that ranks can read, and the reasons why others cannot be read, by name. Collective."""
    readable: tuple[list[Manifest], dict[str, str]] = [], {}
    complaint = None
    if place.asks_for_windows:
        try:
            readable = place.store.manifests_and_refused()
        except OSError as error:
            complaint = f"{place.store}: {error.strerror}; the windows cannot be listed"
    kind = tuple[str | None, tuple[list[Manifest], dict[str, str]]]
    answers = all_gather_objects((complaint, readable), kind)
    if refusal := next((text for text, _ in answers if text), None):
        raise ConfigError(refusal)
    reported = [answer for _, answer in answers]
    windows = {manifest.name: manifest for manifests, _ in reported for manifest in manifests}
    refused = {name: why for _, reasons in reported for name, why in reasons.items() if name not in windows}
    if dist.get_rank() == 0:
        for why in refused.values():
            log.warning(why)
    return newest_first(windows.values()), refused


def _refuse_other_settings(place: SharedFolder, manifest: Manifest, settings: Mapping[str, Any]) -> None:
    if other := manifest.other_settings(settings):
        differences = "; ".join(other[:4])
        raise ConfigError(
            f"--moevement-load {place.store}: {manifest.name} is of a job with other settings ({differences}); a "
            "replay would not repeat the lost iterations. Load the window with the same flags, or turn it into a dense "
            f"checkpoint, which loads under another layout: moevement export {place.store} --to DIR SCRIPT ARGS, and "
            "then --load DIR"
        )
