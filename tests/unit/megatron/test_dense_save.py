"""A dense save names a folder that does not answer, and the server of its results imports neither script nor torch."""

from __future__ import annotations

import errno
import os
import queue
import sys
from importlib import import_module
from pathlib import Path

import psutil
import pytest
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megatron.moevement.restart.saves import WRITERS
from megatron.moevement.runtime.dense_save import _unwritable
from tests.harness import run_ranks


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EIO, errno.ENOTCONN])
def test_a_disk_that_does_not_answer_is_named(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _unwritable(tmp_path, 5) is None

    def stat(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "stat", stat)
    assert _unwritable(tmp_path, 5) == f"--save {tmp_path}: {os.strerror(number)}"


def _results_through_a_server(writer: str, script: str) -> tuple[list[str], str]:
    """Send results through a writer's queue; return the files of torch that its server maps, and the script's path."""
    main = sys.modules["__main__"]
    main.__file__, main.__spec__ = script, None
    results = import_module(writer).get_write_results_queue()
    sent = {0: [WriteResult(MetadataIndex("weight"), 8, "a part")]}
    results.put(sent)
    (server,) = psutil.Process().children()
    is_torch = [area.path for area in server.memory_maps() if "torch" in area.path]
    assert results.get_nowait() == sent
    with pytest.raises(queue.Empty):
        results.get_nowait()
    return is_torch, str(main.__file__)


@pytest.mark.parametrize("writer", WRITERS)
def test_the_server_of_results_imports_neither_script_nor_torch(writer: str, tmp_path: Path) -> None:
    """Check the imports: the first save of each rank would wait for them, and each rank would keep them in memory."""
    script = tmp_path / "pretrain.py"
    script.write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    (rank,) = run_ranks(_results_through_a_server, 1, writer, str(script), init_process_group=False)
    assert rank.result == ([], str(script))
    assert not (tmp_path / "imported").exists()
