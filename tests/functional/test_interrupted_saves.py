"""Ranks that write a dense checkpoint while another rank dies leave nothing of it in later checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.moevement.runtime.checkpoint_metadata import read_metadata
from megatron.moevement.runtime.dense_checkpoint import listed_bytes
from tests.functional.elastic import ELASTIC, GONE, assert_same, fresh, resized
from tests.launching import survive
from tests.training import SCRIPT

SAVES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync-mcore": {"async_strategy": "mcore"},
    "async-worker": {"async_save": True, "use_persistent_ckpt_worker": True},
    "async-worker-mcore": {"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": "mcore"},
}
QUICK = ("async-worker",)
SMALL: dict[str, Any] = {"global_batch_size": 12}


@pytest.mark.builds
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.full]) for kind in SAVES]
)
@pytest.mark.slow("a dense save in every iteration, and a fresh job")
def test_results_of_an_interrupted_save_are_in_no_later_checkpoint(kind: str, tmp_path: Path) -> None:
    """Compare sizes of files with those listed: a stale list would differ, as files of fewer ranks have other sizes."""
    script, saved = tmp_path / "dying.py", tmp_path / "saved"
    script.write_text(DYING.format(script=str(SCRIPT)))
    survived = survive(
        3, 0, tmp_path / "elastic", options=GONE, script=script,
        **ELASTIC | SMALL | SAVES[kind] | {"save": str(saved), "save_interval": 1},
    )  # fmt: skip
    (event,) = resized(survived)
    assert (event["iteration"], event["world_size"]) == (4, 2)
    survived.check_metrics(9)
    finished = [path for path in sorted(saved.glob("iter_*")) if (path / "metadata.json").exists()]
    iterations = {int(path.name[5:]) for path in finished}
    # A save in the background is lost when the rank dies, and is not repeated once a newer one is complete.
    assert set(range(1, 10)) - iterations <= ({3} if "async_save" in SAVES[kind] else set())
    for path in finished:
        listed = listed_bytes(read_metadata(path / ".metadata"))
        assert listed == {file.name: file.stat().st_size for file in path.glob("*.distcp") if file.name in listed}
        assert len(listed) == (3 if int(path.name[5:]) < 4 else 2)
    assert_same(survived, fresh(2, tmp_path / "fresh", saved, 6, **SMALL), 6)


DYING = """
import os
import signal
import sys
import time
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.strategies import filesystem_async as megatrons
from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async as nvrx

saves = 0


def dying(original):
    def get_save_function_and_args(self):
        global saves
        saves += 1
        if saves == 4 and torch.distributed.get_rank() == 1:
            time.sleep(1.0)  # the others have written
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self)

    return get_save_function_and_args


for module in (megatrons, nvrx):
    module.FileSystemWriterAsync.get_save_function_and_args = dying(
        module.FileSystemWriterAsync.get_save_function_and_args
    )
sys.argv[0] = {script!r}
exec(compile(Path({script!r}).read_text(), {script!r}, "exec"), globals())
"""
