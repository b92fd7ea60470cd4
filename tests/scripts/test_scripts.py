"""What scripts write: docs/config.md, the overview's curves, plots of runs."""

import json
import re
from pathlib import Path

from grpo_dist.config.command import documented_keys
from grpo_dist.config.keys import leaf_keys
from grpo_dist.config.schema_health import RULES, rule_defaults
from grpo_dist.plan.commands import GRPO
from scripts import overview_curves, plot_run
from scripts.config_reference import reference
from tests.messages import refuses

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_of_keys_is_fresh() -> None:
    assert (DOCS / "config.md").read_text() == reference() + "\n", "python -m scripts.config_reference > docs/config.md"
    rows = [line for line in reference().splitlines() if line.startswith("| ")]
    assert all(line.replace("\\|", "").count("|") in (3, 4) for line in rows), "cells survive a table"


def test_every_key_is_there_with_its_comment() -> None:
    keys = {key.name: key for key in documented_keys(GRPO.file, GRPO.schema)}
    of_rules = {f"trainer.health.{rule}.{name}" for rule in RULES for name in rule_defaults(rule)}
    assert sorted({*keys, *of_rules}) == sorted(leaf_keys())
    lines = [f"| `{rule}` | `action={rule_defaults(rule)['action']}`, `steps=" for rule in RULES]
    assert [line for line in lines if line not in reference()] == []
    assert not [name for name, key in keys.items() if not key.comment]
    clip = keys["actor_rollout_ref.actor.clip_ratio_c"]
    assert (clip.default, clip.comment[:10]) == (3.0, "Dual clip:")
    defaults = [keys[f"data.{name}"].default for name in ("train_files", "apply_chat_template_kwargs")]
    assert defaults == ["???", {}]


# --- curves ----------------------------------------------------------------------------------------------------------
ROWS = [
    {"step": 0, "val-core/x/acc/mean@1": 0.25},
    {"step": 1, "critic/score/mean": 0.5, "response_length/mean": 3.0, "actor/loss": 1.0},
    {"step": 2, "critic/score/mean": 0.7, "response_length/mean": 4.0, "val-core/x/acc/mean@1": 0.625, "actor/loss": 2},
]
PICTURE = '<svg>\n  <g id="curves">\n{}  </g>\n  <g id="other">\n  </g>\n</svg>\n'


def run_dir(folder: Path) -> str:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(folder)


def test_runs_are_drawn(tmp_path: Path) -> None:
    runs, out = [run_dir(tmp_path / name) for name in ("one", "two")], tmp_path / "curves.png"
    for metrics in ((), ("--metric", "actor/loss")):
        plot_run.main([str(out), *runs, *metrics])
        assert out.read_bytes().startswith(b"\x89PNG")
        out.unlink()


def test_runs_are_drawn_in_the_overview_in_place_of_what_was_there(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    picture.write_text(PICTURE.format("    <polyline/>\n"))
    overview_curves.main([str(picture), run_dir(tmp_path / "one"), run_dir(tmp_path / "two")])
    line = '    <polyline class="curve" points="684,223.5 703.2,153.75"/>\n'  # 270 - 186 / 4, 270 - 186 * 0.625
    dots = '    <circle class="point" cx="684" cy="223.5" r="3"/><circle class="point" cx="703.2" cy="153.75" r="3"/>\n'
    assert picture.read_text() == PICTURE.format((line + dots) * 2)
    picture.write_text("<svg></svg>\n")
    with refuses(SystemExit, picture, '<g id="curves">'):
        overview_curves.main([str(picture), str(tmp_path / "one")])
    assert picture.read_text() == "<svg></svg>\n"


def test_the_picture_has_the_figures_of_the_docs() -> None:
    """The table of docs/performance.md, runs without staleness: seed, then accuracy at step 5, 10, 15, 20 and 25."""
    rows = re.findall(r"^\| 0 \| \d \| ([\d. |]+?) \| 0 \| 0 \|$", (DOCS / "performance.md").read_text(), re.MULTILINE)
    measured = [[0.325, *map(float, row.split(" | "))] for row in rows]
    picture = (DOCS / "images" / "overview.svg").read_text()
    lines = re.findall(r'<polyline class="curve" points="(.*?)"', picture)
    drawn = [[tuple(map(float, point.split(","))) for point in line.split()] for line in lines]
    assert len(drawn) == 3
    # The axes: step 25 and accuracy 0 have their labels at x=924, and the lowest line at y=270; the highest is y=84.
    places = [[(684 + 240 * i / 5, round(270 - 186 * value, 2)) for i, value in enumerate(row)] for row in measured]
    assert drawn == places
    assert '<text class="note middle" x="924" y="288">25<' in picture
    assert 'd="M684 84H934M684 130.5H934M684 177H934M684 223.5H934M684 270H934"' in picture
    assert not any(word in picture for word in ("vector-effect", "transform", "auto-start-reverse"))
