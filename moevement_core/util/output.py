"""Replacement of standard output and error by streams that never raise an error.

With Python's own streams, a closed pipe (``| head``), a full disk or a limit on file sizes would raise an exception in
the code that prints. The new streams drop that output, and report the problem once, on the other stream.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

_DESCRIPTORS = {"stdout": 1, "stderr": 2}


class _Forgiving(io.FileIO):
    """Raw stream of a descriptor; it drops data that it cannot write."""

    def __init__(self, name: str) -> None:
        super().__init__(_DESCRIPTORS[name], "wb", closefd=False)
        self._stream, self._is_told = name, False

    def write(self, data: Any) -> int:
        """Write ``data``, or drop it and report the error on the other stream."""
        try:
            return super().write(data) or 0
        except OSError as error:
            self._tell(error)
            return len(data)

    def _tell(self, error: OSError) -> None:
        if self._is_told:
            return
        self._is_told = True
        other = next(number for name, number in _DESCRIPTORS.items() if name != self._stream)
        text = f"moevement: {self._stream} cannot be written any more ({error.strerror}); the job continues\n"
        try:
            os.write(other, text.encode())
        except OSError:
            return  # Both streams are broken.


def never_fails() -> None:
    """Replace standard output and error by streams that drop data instead of raising errors.

    Processes that are forked later inherit the streams. If other code, such as a test runner, has already replaced a
    stream, the function leaves it as it is.
    """
    for name in _DESCRIPTORS:
        stream = getattr(sys, name)
        if stream is None:  # The process started with a closed descriptor.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__") and not isinstance(getattr(stream.buffer, "raw", None), _Forgiving):
            is_line_buffered = stream.line_buffering or name == "stderr"
            stream.flush()
            wrapper = io.TextIOWrapper(
                io.BufferedWriter(_Forgiving(name)), encoding=stream.encoding, errors=stream.errors,
                line_buffering=is_line_buffered, write_through=stream.write_through,
            )  # fmt: skip
            setattr(sys, name, wrapper)
            setattr(sys, f"__{name}__", wrapper)
