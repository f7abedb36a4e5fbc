"""Assumed failure rate of a job with a given number of GPUs, for users who have not counted failures."""

from __future__ import annotations

LLAMA_DAYS, LLAMA_GPUS, LLAMA_FAILURES = 54, 16_384, 419
"""Days, H100 GPUs and unexpected interruptions of the training of Llama 3 405B (arXiv 2407.21783, section 3.3.4)."""
GPU_HOURS_BETWEEN_FAILURES = LLAMA_DAYS * 24 * LLAMA_GPUS / LLAMA_FAILURES
"""Mean GPU hours between two unexpected interruptions of the training of Llama 3 405B, about 50,700."""
SOURCE = (
    f"Llama 3's rate: {LLAMA_FAILURES} unexpected interruptions of {LLAMA_GPUS:,} H100 in {LLAMA_DAYS} days, one in "
    f"{GPU_HOURS_BETWEEN_FAILURES:,.0f} GPU hours, arXiv 2407.21783"
)


def mean_time_between_failures_s(gpus: int) -> float:
    """Return the mean seconds between failures of a job, if each of its GPUs fails as often as a GPU of Llama 3."""
    return GPU_HOURS_BETWEEN_FAILURES / gpus * 3600
