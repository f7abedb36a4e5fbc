"""A job restarts from its own newest complete checkpoint, or else as it first started, and reports which."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron.moevement.restart import origin
from megatron.moevement.restart.origin import as_at_first, checkpoint_meant, mark_saved, newest_saved, resumed
from megatron.moevement.runtime.dense_checkpoint import TRACKER, mend_tracker
from moevement_core.errors import RecoveryError

JOB = "8f3a2c1d"


def args_of(**flags: Any) -> Namespace:
    defaults = {"load": None, "save": None, "ckpt_step": None, "no_save_optim": False, "no_save_rng": False}
    return Namespace(**defaults | {"pretrained_checkpoint": None} | flags)


def saved(folder: Path, step: int, job: str | None = JOB, **flags: Any) -> None:
    (folder / f"iter_{step:07d}").mkdir(parents=True, exist_ok=True)
    (folder / f"iter_{step:07d}" / "model.pt").write_bytes(b"weights")
    (folder / TRACKER).write_text(str(step))
    if job is not None:
        mark_saved(folder, step, job, args_of(**flags))


def test_the_newest_checkpoint_of_this_job_is_found_and_no_other(tmp_path: Path) -> None:
    assert newest_saved(None, JOB) is None
    assert newest_saved(str(tmp_path), JOB) is None
    saved(tmp_path, 100, job=None)  # of an earlier job
    saved(tmp_path, 120, job="another0")
    assert newest_saved(str(tmp_path), JOB) is None
    saved(tmp_path, 130)
    saved(tmp_path, 140)
    saved(tmp_path, 150, job="another0")
    assert newest_saved(str(tmp_path), JOB) == 140


def test_one_that_is_torn_or_not_finished_or_not_all_of_the_state_is_none(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    saved(tmp_path, 20, no_save_optim=True)
    saved(tmp_path, 30, no_save_rng=True)
    assert newest_saved(str(tmp_path), JOB) == 10
    saved(tmp_path, 40)
    (tmp_path / "iter_0000040" / "model.pt").unlink()
    assert newest_saved(str(tmp_path), JOB) == 10
    saved(tmp_path, 50)
    (tmp_path / TRACKER).write_text("40")  # an asynchronous save that is not finished
    assert newest_saved(str(tmp_path), JOB) == 10


@pytest.mark.parametrize("text", ["", "1", "iter"])
def test_a_tracker_whose_writer_was_stopped_names_the_newest_whole_checkpoint(text: str, tmp_path: Path) -> None:
    mend_tracker(tmp_path)
    assert not (tmp_path / TRACKER).exists()
    saved(tmp_path, 10)
    saved(tmp_path, 20)
    (tmp_path / "iter_0000020" / "model.pt").unlink()
    (tmp_path / TRACKER).write_text(text)
    mend_tracker(tmp_path)
    assert (tmp_path / TRACKER).read_text() == ("1" if text == "1" else "10")
    (tmp_path / "iter_0000010" / "model.pt").unlink()
    (tmp_path / TRACKER).write_text("")
    mend_tracker(tmp_path)
    assert not (tmp_path / TRACKER).exists()


def test_what_load_means(tmp_path: Path) -> None:
    assert checkpoint_meant(args_of()) == ""
    assert checkpoint_meant(args_of(load=str(tmp_path))) == ""
    saved(tmp_path, 100)
    assert checkpoint_meant(args_of(load=str(tmp_path))) == "100"
    assert checkpoint_meant(args_of(load=str(tmp_path), ckpt_step=60)) == "60"


def test_all_of_an_own_checkpoint_is_loaded_whatever_the_flags_leave_out(tmp_path: Path) -> None:
    flags = resumed(str(tmp_path), 140).flags
    assert flags["load"] == str(tmp_path)
    assert flags["ckpt_step"] == 140
    assert not any(flags[name] for name in ("finetune", "no_load_optim", "no_load_rng", "pretrained_checkpoint"))


def test_a_first_start_is_repeated_though_the_folder_has_newer_ones(tmp_path: Path) -> None:
    saved(tmp_path, 100, job=None)
    args = args_of(load=str(tmp_path), save=str(tmp_path), finetune=True)
    first = checkpoint_meant(args)
    saved(tmp_path, 140, no_save_optim=True)
    began = as_at_first(args, first)
    assert began.flags == {"ckpt_step": 100}, "and the user's own flags"
    assert re.search(r"\biteration 100\b.*--load\b", began.sentence)
    assert not began.is_resumed


def test_a_first_start_from_nothing_loads_nothing(tmp_path: Path) -> None:
    args = args_of(load=str(tmp_path), save=str(tmp_path))
    first = checkpoint_meant(args)
    saved(tmp_path, 140, no_save_optim=True)
    began = as_at_first(args, first)
    assert began.flags == {"load": None, "ckpt_step": None}
    assert "seed" in began.sentence


def test_a_first_start_that_cannot_be_repeated_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 100, job=None)
    args = args_of(load=str(tmp_path))
    (tmp_path / "iter_0000100" / "model.pt").unlink()
    with pytest.raises(RecoveryError, match=r"--load\b.*\biteration 100\b.*\biter_0000100\b"):
        as_at_first(args, "100")
    with pytest.raises(RecoveryError, match=rf"--load\b.*\brelease\b.*{re.escape(TRACKER)}"):
        as_at_first(args, origin.RELEASE)
    (tmp_path / TRACKER).write_text(origin.RELEASE)
    assert "release" in as_at_first(args, origin.RELEASE).sentence
