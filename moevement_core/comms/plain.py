"""Conversion of nested plain data with tensors to JSON and a list of tensors, and back. It needs no pickle."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moevement_core.errors import SnapshotError

_TENSOR, _ARRAY, _TUPLE, _BYTES, _MAPPING = "@tensor", "@array", "@tuple", "@bytes", "@mapping"


def flatten(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return ``value`` in a form that JSON can hold, and a list of its tensors.

    In that form, the index of a tensor in the list stands for the tensor.

    Raises:
        SnapshotError: a part of ``value`` is neither plain data nor a tensor.
    """
    tensors: list[torch.Tensor] = []
    return _flatten(value, tensors), tensors


def _flatten(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return {_TENSOR: [len(tensors) - 1, str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, np.ndarray):
        return {
            _ARRAY: [_flatten(torch.from_numpy(np.ascontiguousarray(value).view(np.uint8)), tensors), str(value.dtype)]
        }
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return {_BYTES: value.hex()}
    if isinstance(value, tuple):
        return {_TUPLE: [_flatten(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_flatten(item, tensors) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("@") for key in value):
            return {key: _flatten(item, tensors) for key, item in value.items()}
        return {_MAPPING: [[_flatten(key, tensors), _flatten(item, tensors)] for key, item in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise SnapshotError(f"a {type(value).__name__} cannot be kept in a snapshot; give plain data and tensors")


def restore(plain: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the value that :func:`flatten` converted.

    Args:
        plain: value in the form that JSON can hold.
        tensors: tensors of the value, each as :func:`flatten` returned it, or as its bytes (uint8, flat).

    Raises:
        SnapshotError: :func:`flatten` did not make ``plain``, or ``tensors`` do not match it.
    """
    try:
        return _restore(plain, tensors)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise SnapshotError(f"data cannot be decoded ({error}); another version of MoEvement encoded it") from None


def _restore(plain: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(plain, list):
        return [_restore(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        ((mark, value),) = plain.items()
        if mark == _TENSOR:
            index, dtype, shape = value
            return tensors[index].reshape(-1).view(torch.uint8).view(getattr(torch, dtype)).reshape(shape)
        if mark == _ARRAY:
            return _restore(value[0], tensors).numpy().view(np.dtype(value[1]))
        if mark == _BYTES:
            return bytes.fromhex(value)
        if mark == _TUPLE:
            return tuple(_restore(item, tensors) for item in value)
        if mark == _MAPPING:
            return {_restore(key, tensors): _restore(item, tensors) for key, item in value}
    return {key: _restore(item, tensors) for key, item in plain.items()}
