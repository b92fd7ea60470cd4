"""The metrics as Prometheus gets them from the endpoint of Ray's agent."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.tracking.base import RunInfo, build_trackers
from grpo_dist.tracking.metric_names import DistinctNames
from grpo_dist.trainer.record import gauge_name
from tests.messages import refuses
from tests.trainer.metrics_page import PAGE, documented_names

SAMPLE = re.compile(r'^ray_grpo_dist_(\w+)\{(?=.*experiment="first \\"run\\"")(?=.*project="sums").*\} (\S+)$', re.M)
DEADLINE_S = 60.0
RUN: dict[str, Any] = {"project_name": "sums", "experiment_name": 'first "run"', "config": {}, "resumed_step": None}


def test_all_metrics_have_different_names() -> None:
    assert gauge_name("val-core/openai/gsm8k/acc/mean@8") == "grpo_dist_val_core_openai_gsm8k_acc_mean_8"
    assert gauge_name("reward_extra/zähler") == "grpo_dist_reward_extra_z_hler"
    names = documented_names(PAGE.read_text())
    assert len({gauge_name(name) for name in names}) == len(set(names)) > 100
    apart = DistinctNames(gauge_name)
    assert [apart["x@y"], apart["x_y"], apart["x@y"]] == ["grpo_dist_x_y", "grpo_dist_x_y_2", "grpo_dist_x_y"]
    assert all(re.fullmatch(r"[a-z_][a-zA-Z0-9_]*", gauge_name(name)) for name in names)


@pytest.mark.deep
@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_the_last_values_are_exported_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray forgets a gauge that has not been set for some seconds, and a step may take minutes."""
    from ray.util.metrics import Gauge

    sets: Counter[str] = Counter()
    plain = Gauge.set
    monkeypatch.setattr(Gauge, "set", lambda self, *args: (sets.update([self.info["name"]]), plain(self, *args)))
    with build_trackers(["prometheus"], RunInfo(run_dir=tmp_path, **RUN)) as trackers:
        url = re.search(r"http://127\.0\.0\.1:\d+/metrics", trackers.notes[1])
        assert url is not None

        def seen() -> dict[str, float]:
            with urlopen(url[0], timeout=10) as answer:
                return {name: float(value) for name, value in SAMPLE.findall(answer.read().decode())}

        trackers.log({"critic/score/mean": 0.25, "actor/lr": math.nan, "val-core/a/acc/mean@4": 0.5}, 1)
        trackers.log({"critic/score/mean": 0.375, "actor/lr": math.inf}, 2)
        expected = {"critic_score_mean": 0.375, "val_core_a_acc_mean_4": 0.5, "training_global_step": 2}
        wait_until(lambda: seen() == expected)
        wait_until(lambda: sets["grpo_dist_val_core_a_acc_mean_4"] > 2)
        assert len(trackers.notes) == 2, "none was dropped"


@pytest.mark.deep
@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_without_rays_agent_the_run_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    nodes = [node | {"MetricsExportPort": 0} for node in ray.nodes()]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    with refuses(ConfigError, "trainer.logger", "'prometheus'", "--metrics-export-port", "remove 'prometheus'"):
        build_trackers(["prometheus"], RunInfo(run_dir=tmp_path, **RUN))


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.2)
