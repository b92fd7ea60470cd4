import ast
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

import grpo_dist
from grpo_dist.config.schema_health import RULES
from grpo_dist.errors import ConfigError, GrpoDistError, WorkerLost
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.placement import placement
from grpo_dist.runtime.batch_ref import DataProtoRef, Frame
from grpo_dist.runtime.event_loop import run
from grpo_dist.tracking.base import RunInfo, build_trackers
from grpo_dist.tracking.metric_names import DistinctNames
from grpo_dist.trainer.metrics import (
    PeakMemory,
    batch_metrics,
    mismatch_causes,
    num_devices,
    performance_metrics,
    staleness_metrics,
    zero_variance_share,
)
from grpo_dist.trainer.record import gauge_name
from tests.messages import refuses
from tests.runtime.fakes import Held, settle
from tests.sources import parsed
from tests.trainer.metrics_page import PAGE, documented_names, undocumented

PACKAGE = Path(grpo_dist.__file__).parent
FAMILIES = "actor|critic|health|num_turns|perf|response_length|reward|rollout_corr|staleness|timing_s|train|training"


def metrics_in_code() -> set[str]:
    """Text in the package that is the whole name of a metric."""
    nodes = (node for path in PACKAGE.rglob("*.py") for node in ast.walk(parsed(path)))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {name for name in texts if re.fullmatch(rf"({FAMILIES})/[a-z_0-9]*[a-z0-9](/[a-z_]+)?", name)}


def test_zero_variance_share() -> None:
    for scores, groups in (([1, 1, 0, 1, 5.0], "aabbc"), ([1, np.nan, 0, 1, np.nan, np.nan], "aabbcc")):
        assert zero_variance_share(np.array(scores), np.array([*groups])) == pytest.approx(2 / 3)


def scored(scores: list[float]) -> DataProtoRef:
    rows = len(scores)
    small = {name: np.ones(rows) for name in ("response_length", "prompt_length", "num_turns", "truncated")}
    values = np.array(scores, np.float32)
    return DataProtoRef(small=small | {"uid": np.array(["a"] * rows), "score": values, "reward": values}, num_rows=rows)


def test_names_that_verls_boards_show() -> None:
    batch = scored([1, 2, 3])
    lengths = {"response_length": np.array([4, 0, 8]), "truncated": np.array([True, False, False])}
    batch.small.update(lengths | {"reward_extra/tool_calls": np.array([3.0, np.nan, 3.0])})
    metrics = batch_metrics(batch)
    assert (metrics["response_length/min"], metrics["response_length_non_aborted/min"]) == (0, 4)
    assert (metrics["response_length_non_aborted/clip_ratio"], metrics["tool_call_counts/mean"]) == (0.5, 3)
    assert metrics["training/num_turns/max"] == 1
    batch = scored([1, 2])
    assert not any(name.startswith(("tool_call_counts", "training/router_replay")) for name in batch_metrics(batch))
    batch.small["unknown_routes"] = np.array([1, 2])  # 3 tokens of two rows of 2 have no recorded experts
    assert batch_metrics(batch)["training/router_replay/unknown"] == 0.75


def test_responses_without_a_score_are_in_no_mean() -> None:
    metrics = batch_metrics(scored([-3, np.nan, -1]))
    assert metrics["critic/score/mean"] == metrics["critic/rewards/mean"] == -2
    assert (metrics["critic/score/max"], metrics["critic/score/min"]) == (-1, -3)
    assert metrics["perf/total_num_tokens"] == 6, "they were sampled"
    none = batch_metrics(scored([np.nan, np.nan]))
    assert not any(name.startswith(("critic/score", "critic/rewards")) for name in none)
    assert none["critic/zero_variance_groups"] == 1
    assert np.isfinite(list(none.values())).all()


BYPASS = "algorithm.rollout_correction.bypass_mode=true"


@pytest.mark.parametrize(
    ("overrides", "unknown", "causes"),
    [
        (["trainer.max_staleness=1"], None, ([5, 5, 5], None, False)),
        (["actor_rollout_ref.rollout.top_p=0.9"], None, (None, None, True)),
        (["actor_rollout_ref.rollout.min_tokens=2", "trainer.max_staleness=2"], None, ([5, 5, 5], None, True)),
        ([], [0, 3, 0], (None, [False, True, False], False)),
        ([], None, None),  # one reason is not split
        (["trainer.max_staleness=1", BYPASS], None, None),  # nothing was measured
    ],
)
def test_why_sampler_and_trainer_may_differ(overrides: list[str], unknown: list[int] | None, causes: Any) -> None:
    """By weights of version 5; with tokens without recorded experts."""
    frame = Frame(("old_log_probs",), (), np.arange(3), np.arange(3))
    batch = DataProtoRef((frame,), {"uid": np.array(["a", "a", "b"])}, 3)
    if unknown is not None:
        batch.small["unknown_routes"] = np.array(unknown)
    found = mismatch_causes(load_config(["data.train_batch_size=16", *overrides])[0], batch, 5)
    assert found is None or len(found) == 3
    assert causes == (found and tuple(each.tolist() if isinstance(each, np.ndarray) else each for each in found))


def test_peak_memory_is_that_of_the_largest_process_and_nobody_waits_for_it() -> None:
    """Of three, of which one is gone."""
    group, found = Held("actor", 3), [{"resident": 1.0, "gpu": 3.0}, {"resident": 2.0}]
    memory = PeakMemory([group])

    async def latest(*answered: int) -> dict[str, float]:
        for rank, answer in group.open("peak_memory_gib"):
            if rank in answered:
                answer.set_result(found[rank]) if rank < 2 else answer.set_exception(WorkerLost("gone", "actor", rank))
        await settle()
        return memory.latest()

    assert run(latest()) == run(latest()) == {}
    assert run(latest(1)) == {"perf/max_memory_resident_gb/actor": 2.0}
    assert len(group.asked) == 3, "two have not answered"
    of_gpu = {"perf/max_memory_gpu_gb/actor": 3.0, "perf/max_memory_allocated_gb": 3.0}
    assert run(latest(0, 2)) == {"perf/max_memory_resident_gb/actor": 2.0} | of_gpu
    run(latest())
    assert len(group.asked) == 6, "they are asked again once all have answered"


def test_throughput_by_hand() -> None:
    """verl's is that of each device."""
    timings = {"step": 4.0, "gen": 2.0, "update_actor": 1.0}
    metrics = {"perf/total_num_tokens": 1000.0, "response_length/mean": 30.0, "prompt_length/mean": 10.0}
    expected = {"throughput": 125, "tokens_per_s": 250, "generation_tokens_per_s": 375, "update_tokens_per_s": 1000}
    found = performance_metrics(timings, metrics, num_devices=2)
    assert {name: found[f"perf/{name}"] for name in expected} == expected
    assert found["timing_s/gen"] == 2.0
    del timings["gen"]  # all of it came out of a checkpoint
    assert "perf/generation_tokens_per_s" not in performance_metrics(timings, metrics, num_devices=2)


def test_the_page_explains_every_metric_of_the_code() -> None:
    """`_spread` takes the name of a family; the trainer's own tests compare the page with what a run reports."""
    names = metrics_in_code()
    assert {"actor/kl_loss", "rollout_corr/rollout_rs_masked_fraction", "staleness/spanning"} <= names
    families = {f"critic/{name}" for name in ("score", "rewards", "advantages", "returns", "values")}
    families.add("training/num_turns")
    expected = (names - families) | {f"{name}/mean" for name in families}
    assert undocumented(expected, PAGE.read_text()) == []


def test_the_page_explains_no_metric_that_does_not_exist() -> None:
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for name in documented_names(PAGE.read_text()):
        fixed = re.split(r"[A-Z]", name)[0].removesuffix("@")
        stem = re.sub(r"/(mean|max|min|share/)?$", "", fixed)
        last = stem.rpartition("/")[2]
        assert stem in source or re.search(rf"\b{last}\b", source), name


def test_the_page_explains_every_health_rule() -> None:
    rows = re.findall(r"^\| (\w+) \|.*\| \d+ \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == list(RULES)
    watching = {name for line in PAGE.read_text().splitlines() for name in re.findall(r"`(\w+)`[^|]*\|$", line)}
    assert set(RULES) - {"non_finite"} <= watching, "the last column"


def test_engines_that_have_joined_are_devices_too() -> None:
    """Three engines of two GPUs each to begin with, on 14; on CPU roles share the machines."""
    sizes = ["actor_rollout_ref.rollout.tensor_model_parallel_size=2", "cluster.rollout_world_size=6"]
    place = placement(load_config(["cluster=node8", *sizes, "cluster.actor_world_size=8", "trainer.nnodes=2"])[0])
    assert [num_devices(place, engines) - place.num_devices for engines in (1, 3, 5)] == [0, 0, 4]
    assert num_devices(placement(load_config([])[0]), 5) == 1


def test_responses_from_weights_out_of_bounds_stop_the_run() -> None:
    versions = {"weight_version": np.array([3, 5]), "last_weight_version": np.array([4, 5])}
    batch = DataProtoRef(small=versions, num_rows=2)
    by_hand = {"mean": 1, "max": 2, "share/0": 0.5, "share/1": 0, "share/2": 0.5, "spanning": 0.5}
    assert staleness_metrics(batch, 5, 2) == {f"staleness/{name}": value for name, value in by_hand.items()}
    with pytest.raises(GrpoDistError, match=r"0 to 2 updates old, and at most 1"):
        staleness_metrics(batch, 5, 1)
    with pytest.raises(GrpoDistError, match=r"-1 to 1 updates old"):
        staleness_metrics(batch, 4, 2)


# --- as Prometheus gets them from the endpoint of Ray's agent
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
