"""The page: one file, in which nothing of a model or a user is code."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from grpo_dist.report.page import page
from grpo_dist.report.rollouts import read_step
from grpo_dist.runs import read_run
from tests.report.runs import write_run, write_step

EVIL = "</script><script>alert(1)</script>{{ data }}"


def data_in(text: str) -> dict[str, Any]:
    found = re.findall(r'id="data-([\w-]+)">([A-Za-z0-9+/=]*)</script>', text)
    return {name: json.loads(gzip.decompress(base64.b64decode(packed))) for name, packed in found}


def test_a_page_holds_everything(tmp_path: Path) -> None:
    rows = [{"step": 1, "critic/score/mean": 0.25, "timing_s/step": 2.0}, {"step": 2, "critic/score/mean": 0.5}]
    run = write_run(tmp_path / "run", rows)
    write_step(run, 1, ["1", EVIL], [1.0, 0.0], tokens=False)
    text = page([read_run(run)], {1: read_step(run, 1, None)})
    data = data_in(text)
    assert data.keys() == {"overview", "step-1"}
    assert data["overview"]["charts"][0]["figure"]["data"][0]["y"] == [0.25, 0.5]
    assert ["training time", "2.0 s, 2.0 s a step"] in data["overview"]["facts"]
    assert data["step-1"]["groups"][0]["responses"][1]["output"] == EVIL
    assert get_plotlyjs() in text
    own = text.replace(get_plotlyjs(), "")
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", own), "nothing is loaded from elsewhere"
    assert """content="default-src 'none'; """ in own, "nor by Plotly"


def test_what_users_and_models_write_is_no_html(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 1, "critic/score/mean": 0.25}], f"trainer.experiment_name='{EVIL}'")
    write_step(run, 1, [EVIL, EVIL], [1.0, 0.0], tokens=False)
    text = page([read_run(run)], {1: read_step(run, 1, None)})
    assert "alert(1)</script>" not in text
    assert "&lt;script&gt;" in text, "in the title"
    assert len(data_in(text)) == 2, "and what looks like a place for data is none"


def test_without_steps_the_page_asks_the_server(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", [{"step": 1, "critic/score/mean": 0.25}]))
    assert data_in(page([run], None)) == {}


def test_two_runs(tmp_path: Path) -> None:
    rows = [{"step": 1, "critic/score/mean": 0.25}]
    names = ("a", "b")
    runs = [read_run(write_run(tmp_path / name, rows, f"trainer.experiment_name={name}")) for name in names]
    found = data_in(page(runs, {}))["overview"]
    assert found["config"]["runs"] == ["grpo_dist/a", "grpo_dist/b"]
    assert {"key": "trainer.experiment_name", "values": ["a", "b"]} in found["config"]["keys"]
