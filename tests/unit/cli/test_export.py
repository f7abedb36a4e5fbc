"""Flags of a job that an export leaves out."""

from __future__ import annotations

from moevement_cli.export import DROPPED, without


def test_folders_of_the_job_are_left_out_with_their_values() -> None:
    words = "--lr 1e-3 --run-dir runs/a --moevement-persist-dir=w --swiglu --save s --save-interval 5 --betas 0.9 0.99"
    assert " ".join(without(words.split(), DROPPED)) == "--lr 1e-3 --swiglu --betas 0.9 0.99"
