"""Standard output and error of a job's processes: when they cannot be written any more that is said once, and no more.

A closed pipe (``| head``), a full disk or a limit on the size of files would else be an exception in whatever printed.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

_DESCRIPTORS = {"stdout": 1, "stderr": 2}


class _Forgiving(io.FileIO):
    """A descriptor to which as much is written as can be; the rest is dropped."""

    def __init__(self, name: str) -> None:
        super().__init__(_DESCRIPTORS[name], "wb", closefd=False)
        self._stream, self._is_told = name, False

    def write(self, data: Any) -> int:
        """Write ``data``, or drop it."""
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
        text = f"moevement: {self._stream} cannot be written any more ({error.strerror}); the job goes on\n"
        try:
            os.write(other, text.encode())
        except OSError:
            return  # there is nobody left to tell


def never_fails() -> None:
    """Let this process, and those forked from it, go on when nobody takes what they print.

    What has put something else in the place of the streams, as tests do, keeps it.
    """
    for name in _DESCRIPTORS:
        stream = getattr(sys, name)
        if stream is None:  # it was closed from the beginning
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
