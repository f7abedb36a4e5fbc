"""The dashboard and the alerts ask for figures that exist, by labels that these figures have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from moevement_core.monitoring.config import LOOPBACK
from moevement_core.run.figures import FIGURES

FOLDER = Path(__file__).parents[3] / "examples" / "monitoring"
LABELS = {figure.exported_name: figure.label for figure in FIGURES}


def dashboard() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "grafana_dashboard.json").read_text(encoding="utf-8")))


def expressions() -> list[str]:
    board = dashboard()
    targets = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    notes = [note["expr"] for note in board["annotations"]["list"]]
    asked = [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [*targets, *notes, *asked, *(rule["expr"] for group in groups for rule in group["rules"])]


def test_every_figure_that_is_asked_for_is_served() -> None:
    asked = {name for text in expressions() for name in re.findall(r"moevement_\w+", text)}
    assert asked <= LABELS.keys()
    missing = LABELS.keys() - asked
    # Only few jobs have the first two figures, and the third repeats another one.
    assert missing == {
        "moevement_tokens_owed", "moevement_expert_imbalance", "moevement_last_recovery_timestamp_seconds"
    }  # fmt: skip


def test_every_figure_is_asked_for_by_labels_that_it_has() -> None:
    for text in expressions():
        for name, selected in re.findall(r"(moevement_\w+)\{([^}]*)\}", text):
            labels = set(re.findall(r"(\w+)=", selected))
            assert labels <= {"job", LABELS[name]}, text
    legends = {
        (name, label)
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"moevement_\w+", target["expr"])
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
    }
    assert all(label in ("job", LABELS[name]) for name, label in legends)


def test_panels_have_a_place_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_what_is_scraped_is_where_it_is_served_by_default() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"{LOOPBACK}:9400"]}]
    assert [(FOLDER / name).exists() for name in config["rule_files"]] == [True]
