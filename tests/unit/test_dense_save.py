"""A folder of dense checkpoints that does not answer is a reason not to save, and none to end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron.moevement.runtime.dense_save import _unwritable


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EIO, errno.ENOTCONN])
def test_a_disk_that_does_not_answer_is_named(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _unwritable(tmp_path, 5) is None

    def stat(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "stat", stat)
    assert _unwritable(tmp_path, 5) == f"--save {tmp_path}: {os.strerror(number)}"
