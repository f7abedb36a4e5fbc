"""Encoding of messages between ranks with msgpack. Pickle is never used, because it would execute received code.

The receiver names the type that it expects, and refuses data of another type.
"""

from __future__ import annotations

import json
from typing import Any, get_origin

import msgspec
import numpy as np
import torch

from moevement_core.comms import plain
from moevement_core.errors import ExchangeError, SnapshotError
from moevement_core.operators import OperatorKind, OperatorTable
from moevement_core.policy.schedule import Schedule


class Plain:
    """Wrapper of nested plain data with tensors, for a value whose exact type the receiver cannot name.

    Tuples inside the value arrive as tuples; without the wrapper, they would arrive as lists.

    Args:
        value: any value that :func:`moevement_core.comms.plain.flatten` accepts.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def encode(value: Any) -> bytes:
    """Return ``value`` as bytes."""
    return msgspec.msgpack.encode(value, enc_hook=_encode)


def decode(data: bytes | memoryview, kind: Any) -> Any:
    """Return the value that another process encoded with :func:`encode`.

    Args:
        data: received bytes.
        kind: type that the value must have.

    Raises:
        ExchangeError: the value has another type, or :func:`encode` did not make the bytes.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode)
    except (msgspec.MsgspecError, SnapshotError, TypeError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        name = getattr(kind, "__name__", None) or str(kind)
        raise ExchangeError(f"received data is not of type {name}: {error}; all ranks need the same version") from None


def _encode(value: Any) -> Any:
    if isinstance(value, Plain):
        marked, tensors = plain.flatten(value.value)
        return [json.dumps(marked), [_tensor_bytes(tensor) for tensor in tensors]]
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), value.tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor):
        return [str(value.dtype).removeprefix("torch."), list(value.shape), _tensor_bytes(value)]
    if isinstance(value, OperatorTable):
        return [value.names, value.kinds, value.full, value.compute, value.gradient]
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def _decode(kind: Any, sent: Any) -> Any:
    base = get_origin(kind) or kind
    if base is Plain:
        text, tensors = msgspec.convert(sent, tuple[str, list[bytes]])
        return Plain(plain.restore(json.loads(text), [_bytes_tensor(tensor) for tensor in tensors]))
    if base is np.ndarray:
        dtype, shape, data = msgspec.convert(sent, tuple[str, list[int], bytes])
        return np.frombuffer(data, dtype=_numbers(dtype)).reshape(shape).copy()
    if base is torch.Tensor:
        dtype, shape, data = msgspec.convert(sent, tuple[str, list[int], bytes])
        return _bytes_tensor(data).view(_torch_dtype(dtype)).reshape(shape)
    if base is OperatorTable:
        array = np.ndarray[Any, np.dtype[np.int64]]
        names, kinds, *sizes = msgspec.convert(
            sent, tuple[tuple[str, ...], tuple[OperatorKind, ...], array, array, array], dec_hook=_decode
        )
        return OperatorTable.of_matrices(names, kinds, *sizes)
    raise NotImplementedError(f"a {base} cannot be received")


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _numbers(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.hasobject or dtype.kind not in "biufc":
        raise ValueError(f"found an array of invalid dtype {name}")
    return dtype


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"found a tensor of unknown dtype {name[:20]!r}")
    return dtype


def pack_schedule(schedule: Schedule) -> tuple[str, bytes]:
    """Return the class name of a schedule, and its encoded fields."""
    return type(schedule).__name__, encode(schedule)


def unpack_schedule(packed: tuple[str, bytes]) -> Schedule:
    """Return the schedule from a class name and encoded fields, as :func:`pack_schedule` returned them.

    Raises:
        ExchangeError: this process knows no schedule class of that name, or the fields are invalid.
    """
    name, data = packed
    known = {kind.__name__: kind for kind in _all_kinds(Schedule)}
    if name not in known:
        raise ExchangeError(f"received a schedule of kind {name[:40]!r}; needs one of {', '.join(sorted(known))}")
    schedule: Schedule = decode(data, known[name])
    return schedule


def _all_kinds(kind: type[Any]) -> list[type[Any]]:
    return [subkind for child in kind.__subclasses__() for subkind in (child, *_all_kinds(child))]
