"""Generator of docs/metrics.md, the list of figures that a run reports. Run ``python scripts/metrics_table.py``."""

from __future__ import annotations

from pathlib import Path

from moevement_core.run import figures
from moevement_core.run.figures import Figure

OUTPUT = Path(__file__).parents[1] / "docs" / "metrics.md"
PURPOSE = """\
# Metrics

This page is for people who watch jobs. It lists the figures that a run reports to Prometheus and TensorBoard;
`moevement top RUN_DIR` shows them in the terminal. `python scripts/metrics_table.py` writes this page, and a test
compares.

## The endpoint

Give `--moevement-metrics-port 9400` among the flags of the script. The endpoint then serves all figures in
Prometheus's text format at `http://127.0.0.1:9400/metrics`. It reads the figures from the run directory, so it needs
`--run-dir`. By default it listens on loopback only; `--moevement-metrics-address 0.0.0.0` lets other hosts connect. It
has no password. Anyone who reaches it can read the figures, and nothing else.

- **A process of its own.** The launcher starts the endpoint, and starts it again if it ends. So the endpoint outlives
  every rank: during a recovery `moevement_processes` shows how many processes are left. It shares no locks, threads or
  connections with the job, so no request delays training.
- **Several hosts.** One endpoint serves the whole job, on the host of `moevement coordinate`. This host has to see the
  file system with the run directory.
- **Refused.** Under `srun` without `--spares` no process outlives a rank, so the launcher refuses the flag. If the
  port is in use, the job does not start, and one line says so.

[examples/monitoring](../examples/monitoring/prometheus.yaml) has a scrape configuration and a dashboard.

## TensorBoard

If Megatron has a writer (`--tensorboard-dir`, or `--run-dir` with its folder `tensorboard/`), the last rank writes
the tags below in each iteration. The tag of a checkpoint counter shows what this iteration added to the counter, as the
line of `metrics.jsonl` does. Without `--run-dir` there is no record of failures, and the tags of failures stay at 0.

Figures of checkpoints are those of the last rank, which writes the record. If you start a job again in the same run
directory, it continues the figures.
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
