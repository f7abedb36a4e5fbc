"""Check of object stores at the start of a job, before any rank builds a model."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import torch.distributed as dist

from moevement_core.comms.exchange import all_gather_objects, broadcast_object
from moevement_core.errors import ConfigError
from moevement_core.saving.folder import RECOVERY_PATIENCE_S, START_PATIENCE_S
from moevement_core.storage.config import DiskConfig
from moevement_core.storage.locations import described, is_url
from moevement_core.storage.object_store import ObjectStore
from moevement_core.util.bounded import within

_PROBE = ".moevement-probe-"


def check_stores(disk: DiskConfig) -> None:
    """Refuse object stores that do not work. Collective: all ranks call it at the start, before they build a model.

    The first rank writes an object to the store of ``--moevement-persist-dir``, all ranks read it, and the first rank
    deletes it. It asks a store that the job only reads for its windows. Folders are not checked here.

    Args:
        disk: flags of windows.

    Raises:
        ConfigError: a rank cannot use a store. Every rank raises it.
    """
    if disk.persist_dir is not None and is_url(disk.persist_dir):
        _check_written("--moevement-persist-dir", ObjectStore(disk.persist_dir))
    if disk.load is not None and is_url(disk.load) and disk.load != disk.persist_dir:
        store = ObjectStore(disk.load)
        _agree("--moevement-load", store, store.own_windows if dist.get_rank() == 0 else None)


def _check_written(flag: str, store: ObjectStore) -> None:
    is_first = dist.get_rank() == 0
    name = broadcast_object(f"{_PROBE}{uuid.uuid4().hex}" if is_first else None, str)
    _agree(flag, store, (lambda: store.probe(name)) if is_first else None)
    try:
        _agree(flag, store, lambda: store.find_probe(name))
    finally:
        if is_first:
            _delete(store, name)


def _delete(store: ObjectStore, name: str) -> None:
    try:
        within(RECOVERY_PATIENCE_S, lambda: store.end_probe(name))
    except OSError:
        return  # one small object stays in the store


def _agree(flag: str, store: ObjectStore, request: Callable[[], object] | None) -> None:
    """Make a request on this rank, and raise the first error of any rank on all ranks. Collective.

    Args:
        flag: flag that names the store, for messages.
        store: object store.
        request: request to make; None on ranks that make none.
    """
    complaint = None
    try:
        if request is not None:
            within(START_PATIENCE_S, request)
    except Exception as error:  # libraries of stores raise errors of many kinds, also before the first request
        complaint = f"{flag} {store}: {described(error)}; give a store that every rank can use, or a folder"
    if refusal := next((text for text in all_gather_objects(complaint, str | None) if text), None):
        raise ConfigError(refusal)
