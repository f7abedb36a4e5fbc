"""Safe reader of a dense checkpoint's ``.metadata`` file, which torch writes as a pickle."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    # The plan of a save, which a later save compares with its own plan.
    ("torch.distributed.checkpoint.planner", "BytesIOWriteData"),
    ("torch.distributed.checkpoint.planner", "SavePlan"),
    ("torch.distributed.checkpoint.planner", "TensorWriteData"),
    ("torch.distributed.checkpoint.planner", "WriteItem"),
    ("torch.distributed.checkpoint.planner", "WriteItemType"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    # Empty classes of earlier releases of Megatron.
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
}
"""Classes that a ``.metadata`` file may name; they only hold data. Each ``torch.<dtype>`` is also allowed."""


class RefusedClass(Exception):
    """Error for a pickle that names a class which no ``.metadata`` file needs."""


class _DataOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise RefusedClass(f"names {module}.{name}, which no checkpoint's metadata needs; the file is not read")
        return super().find_class(module, name)


def read_metadata(path: Path) -> Any:
    """Return the ``torch.distributed.checkpoint`` metadata in ``path``.

    Raises:
        RefusedClass: the file names a class that no ``.metadata`` file needs.
        Exception: the file is damaged.
    """
    with path.open("rb") as file:
        return _DataOnly(file).load()
