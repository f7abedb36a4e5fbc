"""Generator of docs/metrics.md, the figures that a run shows. Run ``python scripts/metrics_table.py``."""

from __future__ import annotations

from pathlib import Path

from moevement_core.run import figures
from moevement_core.run.figures import Figure

OUTPUT = Path(__file__).parents[1] / "docs" / "metrics.md"
PURPOSE = """\
# Metrics

What a run shows of itself while it goes on: to Prometheus at an endpoint, to TensorBoard, and in the terminal
(`moevement top RUN_DIR`). `python scripts/metrics_table.py` writes this page, and a test compares.

## The endpoint

`--moevement-metrics-port 9400` among the flags of the script serves all of this in Prometheus's text format at
`http://127.0.0.1:9400/metrics`. It needs `--run-dir`, from which the figures are read, and is off by default. It
listens on loopback alone; `--moevement-metrics-address 0.0.0.0` lets other hosts ask. There is no password, and
anyone who can reach it can read the figures, and nothing else.

It is a process of its own beside the launcher, which starts it again should it end, so it outlives every rank: while a
failure is recovered from, `moevement_processes` says how many are left. It holds none of the job's locks, threads or
connections, and nothing that asks it can delay training or a lease. Over several hosts it is where `moevement
coordinate` runs, the one place that has to live anyway; the tasks tell the coordinator of the flags, and the run
directory has to be on a file system that this host sees, too. Under `srun` without `--spares` nothing outlives a rank,
and the flag is refused. One endpoint serves the whole job. Where a port cannot be had, the job does not begin, and one
line says so.

[examples/monitoring](../examples/monitoring/prometheus.yaml) has a scrape configuration and a dashboard of them.

## TensorBoard

Where Megatron has a writer (`--tensorboard-dir`, or `--run-dir`, whose `tensorboard/` it is by default), the last rank
writes the tags below in each iteration. The tag of a counter of checkpoints shows what the iteration added to it, as
its line of `metrics.jsonl` does. Without `--run-dir` there is no record of failures, and their tags stay at 0. W&B,
OneLogger and all else that Megatron logs to are as Megatron has them.

Figures of checkpoints are those of the rank that writes the record, the last one. After a job has been started again in
the same run directory they go on from what it holds.
"""


def table() -> str:
    """Return the text of the page."""
    return "\n".join(
        [
            PURPOSE,
            "## Training",
            "",
            *_rows(figures.OF_TRAINING),
            "",
            "## Checkpoints",
            "",
            *_rows(figures.OF_CHECKPOINTS),
            "",
            "## The job",
            "",
            *_rows(figures.OF_JOB),
            "",
        ]
    )


def _rows(shown: tuple[Figure, ...]) -> list[str]:
    rows = [
        f"| `{_with_label(figure)}` | {figure.kind} | {figure.unit or '-'} | "
        f"{f'`{_tag(figure)}`' if figure.tag else '-'} | {figure.help} |"
        for figure in shown
    ]
    return ["| Prometheus | | unit | TensorBoard | |", "|---|---|---|---|---|", *rows]


def _with_label(figure: Figure) -> str:
    return figure.exported_name + (f"{{{figure.label}}}" if figure.label else "")


def _tag(figure: Figure) -> str:
    return f"{figure.tag}{f'/{figure.label.upper()}' if figure.label else ''}"


if __name__ == "__main__":
    OUTPUT.write_text(table(), encoding="utf-8")
