"""Safe reader of a dense checkpoint's list of bytes, which torch writes as a pickle."""

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
    # The plan of a save, with which a later save compares itself.
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
"""Classes of which such a list consists. They only hold data. Each ``torch.<dtype>`` is allowed too."""


class RefusedClass(Exception):
    """Error for a pickle that names a class for which a list of bytes has no use."""


class _DataOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise RefusedClass(f"names {module}.{name}, which no checkpoint's list of tensors needs; it is not read")
        return super().find_class(module, name)


def read_metadata(path: Path) -> Any:
    """Return the ``torch.distributed.checkpoint`` metadata in ``path``.

    Raises:
        RefusedClass: the file names a class that no list of tensors needs.
        Exception: the file is damaged.
    """
    with path.open("rb") as file:
        return _DataOnly(file).load()
