"""A job trains and recovers with the Megatron of a checkout, in every process, and its record names the checkout."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from moevement_core.run.run_record import RunRecord
from tests.functional.jobs import SPARSE
from tests.launching import command, finished, logs
from tests.training import SCRIPT, flags

NOTING = """
import os, runpy, sys
import megatron.core

with open(os.path.join({folder!r}, str(os.getpid())), "w") as note:
    note.write(os.path.dirname(megatron.core.__file__))
runpy.run_path({script!r}, run_name="__main__")
"""
"""Script that trains as the example does, and before that notes the Megatron of its process."""


def _checkout(folder: Path) -> Path:
    """Make a folder that is laid out as a checkout, with the sources of this process's Megatron and another version."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    sources = Path(spec.origin).parent
    for path in sources.iterdir():
        (core / path.name).symlink_to(path)
    for name in ("__init__.py", "package_info.py"):
        (core / name).unlink()
        shutil.copy(sources / name, core / name)
    (core / "package_info.py").write_text((core / "package_info.py").read_text().replace("MAJOR = 0", "MAJOR = 7"))
    (folder / "megatron" / "training").symlink_to(sources.parent / "training")
    return folder


@pytest.mark.builds  # a launcher that imports for itself
def test_every_process_of_a_job_uses_the_checkout(tmp_path: Path) -> None:
    folder = _checkout(tmp_path / "checkout")
    notes = tmp_path / "notes"
    notes.mkdir()
    script = tmp_path / "train.py"
    script.write_text(NOTING.format(folder=str(notes), script=str(SCRIPT)))
    words = flags(**SPARSE | {"pipeline_model_parallel_size": 2, "train_iters": 8})
    fault = ("--moevement-inject", "rank=1,iteration=5,phase=backward")
    options = ("--megatron", str(folder), "--nproc", "2", "--spares", "1")
    code, out, err = finished(command(*options, str(script), *words, *fault, "--run-dir", str(tmp_path / "run")))
    assert code == 0, out + err + logs(tmp_path / "run")
    job = RunRecord(tmp_path / "run").job()
    assert job is not None
    assert job.versions["megatron-core"] in out
    assert job.versions["megatron-core"].startswith("7.")
    assert job.versions["megatron-core"].endswith(str(folder))
    used = {path.read_text() for path in notes.iterdir()}
    assert used == {str(folder / "megatron" / "core")}
    assert len(list(notes.iterdir())) >= 3
