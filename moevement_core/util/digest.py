"""Digest of nested training state, computed from the values of the state alone.

Two states have the same digest exactly if they have the same structure, names, dtypes, shapes and bits. The digest
ignores times, hosts, process ids, memory addresses and the insertion order of dicts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


_CHUNK_BYTES = 64 << 20
"""Bytes of a device tensor that are copied to the host at a time."""


def digest(state: Any) -> str:
    """Return the SHA-256 of ``state`` in hexadecimal.

    Args:
        state: tensors, arrays, numbers, strings, bytes, None, or nested mappings, lists and tuples of these.

    Raises:
        TypeError: ``state`` contains an object without a value to hash, such as a function or an open file.
    """
    sha = hashlib.sha256()
    _feed(sha, state, "state")
    return sha.hexdigest()


def _feed(sha: _Hash, value: Any, where: str) -> None:
    if isinstance(value, torch.Tensor):
        _feed_tensor(sha, value)
    elif isinstance(value, np.ndarray):
        _tag(sha, "array", str(value.dtype), str(value.shape))
        sha.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, np.generic):
        _feed(sha, value.item(), where)
    elif isinstance(value, Mapping):
        _tag(sha, "mapping", str(len(value)))
        for key in sorted(value, key=_key):
            _tag(sha, "key", _key(key))
            _feed(sha, value[key], f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        _tag(sha, "sequence", str(len(value)))
        for index, item in enumerate(value):
            _feed(sha, item, f"{where}[{index}]")
    elif isinstance(value, bytes | bytearray):
        _tag(sha, "bytes", str(len(value)))
        sha.update(bytes(value))
    elif value is None or isinstance(value, bool | int | str):
        _tag(sha, type(value).__name__, repr(value))
    elif isinstance(value, float):
        _tag(sha, "float", value.hex())
    else:
        raise TypeError(f"{where}: a {type(value).__name__} has no digest; leave it out or turn it into plain data")


def _feed_tensor(sha: _Hash, tensor: torch.Tensor) -> None:
    tensor = tensor.detach()
    _tag(sha, "tensor", str(tensor.dtype), str(tuple(tensor.shape)))
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    for piece in flat.split(_CHUNK_BYTES):
        sha.update(piece.cpu().numpy().data)


def _tag(sha: _Hash, *words: str) -> None:
    # A length in front of each word makes ("ab", "c") differ from ("a", "bc").
    for word in words:
        encoded = word.encode()
        sha.update(len(encoded).to_bytes(8, "little") + encoded)


def _key(key: Any) -> str:
    return f"{type(key).__name__}:{key!r}"
