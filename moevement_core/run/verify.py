"""Bit-for-bit comparison of two runs, with the first difference between them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from moevement_core.errors import RunRecordError
from moevement_core.run.run_record import RunRecord
from moevement_core.util.words import counted

SERIES = ("loss", "grad_norm")


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison of two runs."""

    equal: bool
    iterations_compared: int
    first_difference: str | None = None
    """First difference, in words; None if the runs are equal."""
    parts: dict[str, bool] = field(default_factory=dict)
    """Result for each part of the final state, by the name of the part: True if both runs have the same digest."""
    lost_updates: list[str] = field(default_factory=list)
    """Texts on recoveries of either run that lost updates of experts; after such a recovery, runs usually differ."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data, which ``moevement verify --json`` prints."""
        return asdict(self)


def compare(a: RunRecord, b: RunRecord, *, common_iterations: bool = False) -> Verdict:
    """Compare losses, gradient norms and other values of each iteration, and the final state, of two finished runs.

    Values are compared bit for bit, and the final state by digests.

    Args:
        a: first run.
        b: second run.
        common_iterations: True to compare only the iterations that both runs recorded; a resumed run, for example, has
            no iterations before its start. If it is False, an iteration that only one run recorded is a difference.

    Raises:
        RunRecordError: a run is missing, unfinished or damaged, or has several lines for one iteration.
    """
    summaries = a.summary(), b.summary()
    lines = _by_iteration(a), _by_iteration(b)
    common = sorted(lines[0].keys() & lines[1].keys())
    difference = None
    if not common:
        difference = "the runs have no iteration in common"
    elif not common_iterations and lines[0].keys() != lines[1].keys():
        unmatched = min(lines[0].keys() ^ lines[1].keys())
        owner = a if unmatched in lines[0] else b
        difference = f"iteration {unmatched} is only in {owner.folder}"
    series = _first_difference(lines, common)
    digests = summaries[0]["state_digest"], summaries[1]["state_digest"]
    names = sorted(digests[0]["parts"].keys() | digests[1]["parts"].keys())
    parts = {name: digests[0]["parts"].get(name) == digests[1]["parts"].get(name) for name in names}
    difference = series or difference or _first_state_difference(digests, parts)
    return Verdict(
        equal=difference is None,
        iterations_compared=len(common),
        first_difference=difference,
        parts=parts,
        lost_updates=[*_lost_updates(a), *_lost_updates(b)],
    )


def _lost_updates(run: RunRecord) -> list[str]:
    return [
        f"{run.folder}: the recovery to iteration {event['until']} lost updates of {len(event['lost_tokens'])} experts "
        f"by {sum(event['lost_tokens'].values()):,} routed tokens"
        for event in run.events()
        if event["event"] == "recovery" and event.get("lost_tokens")
    ]


def _by_iteration(run: RunRecord) -> dict[int, dict[str, Any]]:
    """Return the lines of a run by iteration.

    Raises:
        RunRecordError: an iteration has several lines, for example because two jobs wrote to one directory.
    """
    lines = run.metrics()
    counts = Counter(line["iteration"] for line in lines)
    if repeated := sorted(iteration for iteration, count in counts.items() if count > 1):
        shown = ", ".join(map(str, repeated[:5])) + (", ..." if len(repeated) > 5 else "")
        raise RunRecordError(
            f"{run.metrics_path}: {counted(len(repeated), 'iteration')} with more than one line ({shown}), for "
            "example because two jobs wrote to one run directory; run the job again with another --run-dir"
        )
    return {line["iteration"]: line for line in lines}


def _first_difference(lines: tuple[dict[int, Any], dict[int, Any]], iterations: list[int]) -> str | None:
    for iteration in iterations:
        left, right = lines[0][iteration], lines[1][iteration]
        for name in (*SERIES, "loss_scale", "skipped", "learning_rate"):
            # JSON holds the shortest exact form of a float, so equal values have equal bits. NaN is a string here.
            if left.get(name) != right.get(name):
                return f"iteration {iteration}: values of {name} are {left.get(name)} and {right.get(name)}"
    return None


def _first_state_difference(digests: tuple[dict[str, Any], dict[str, Any]], parts: dict[str, bool]) -> str | None:
    if digests[0]["all"] == digests[1]["all"]:
        return None
    if len(digests[0]["ranks"]) != len(digests[1]["ranks"]):
        return f"numbers of ranks are {len(digests[0]['ranks'])} and {len(digests[1]['ranks'])}"
    for part, same in parts.items():
        if not same:
            pairs = zip(digests[0]["ranks"], digests[1]["ranks"], strict=True)
            ranks = [str(rank) for rank, (left, right) in enumerate(pairs) if left.get(part) != right.get(part)]
            return f"final state: {part} differ on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
    return "final state: the digests differ"
