"""Metrics of a validation batch by hand, its requests and the rows that are shown."""

import numpy as np
import pytest

from grpo_dist.config.schema_job import StopAtConfig
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.tracking.metric_names import require_metrics, why_it_ends
from grpo_dist.trainer.validation import shown_rows, validation_metrics, validation_requests
from tests.messages import refuses, says
from tests.trainer.instant_pump import tokenized

NAN = np.nan
SOURCES = {"v0": "gsm8k", "v1": "arithmetic", "v2": "gsm8k"}


def metrics_of(n: int, **columns: list) -> dict[str, float]:
    """Prompts v0, v1 and v2 with n responses each; lengths 1, 2, 3 ..., nothing truncated, two turns."""
    rows = 3 * n
    small = {"uid": np.repeat(["v0", "v1", "v2"], n), "response_length": np.arange(1, rows + 1)}
    small |= {"truncated": np.zeros(rows, int), "num_turns": np.full(rows, 2), "failed": np.zeros(rows, bool)}
    small |= {name.replace("__", "/"): np.array(values, np.float32) for name, values in columns.items()}
    return validation_metrics(DataProtoRef(small=small, num_rows=rows), SOURCES, n)


def test_one_greedy_response_per_prompt() -> None:
    aux = {"response_length": 2.0, "truncated": 0.0, "num_turns": 2.0}
    assert metrics_of(1, score=[1, 1, 0]) == {
        "val-core/gsm8k/reward/mean@1": 0.5,
        "val-core/arithmetic/reward/mean@1": 1.0,
        **{f"val-aux/{source}/{name}/mean": x for source in ("gsm8k", "arithmetic") for name, x in aux.items()},
    }


def test_accuracy_is_the_core_variable_and_the_score_stands_beside_it() -> None:
    """gsm8k: v0 1 0 0 0, answers a b b c (the majority is wrong); v2 1 1 0 0, answers a a b none (right)."""
    acc = [1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    score = [2 * value for value in acc]
    pred = [0, 1, 1, 2, NAN, NAN, NAN, NAN, 0, 0, 1, NAN]
    metrics = metrics_of(4, score=score, reward_extra__acc=acc, pred_id=pred)
    core, aux = (
        {name.removeprefix(start): value for name, value in metrics.items() if name.startswith(start)}
        for start in ("val-core/gsm8k/", "val-aux/gsm8k/")
    )
    assert core == {"acc/mean@4": 3 / 8, "acc/best@4/mean": 1.0, "acc/maj@4/mean": 0.5}
    # pass@2: 1 - C(3,2)/C(4,2) = 1/2 and 1 - C(2,2)/C(4,2) = 5/6
    assert aux["acc/best@2/mean"] == pytest.approx((1 / 2 + 5 / 6) / 2)
    assert aux["acc/worst@2/mean"] == pytest.approx((0 + 1 / 6) / 2)
    assert aux["acc/std@4"] == pytest.approx((3**0.5 / 4 + 1 / 2) / 2)
    assert (aux["acc/worst@4/mean"], aux["reward/mean@4"], aux["reward/best@4/mean"]) == (0.0, 3 / 4, 2.0)
    assert metrics["val-core/arithmetic/acc/best@4/mean"] == 1.0
    assert not any("maj@" in name for name in metrics if "/arithmetic/" in name), "no answers, no vote"


def test_an_accuracy_of_some_responses_only_is_not_one() -> None:
    metrics = metrics_of(1, score=[1, 2, 3], reward_extra__acc=[0.25, 1, NAN], reward_extra__half=[NAN, 4, NAN])
    assert (metrics["val-core/gsm8k/reward/mean@1"], metrics["val-aux/gsm8k/acc/mean"]) == (2.0, 0.25)
    assert (metrics["val-core/arithmetic/acc/mean@1"], metrics["val-aux/arithmetic/half/mean"]) == (1.0, 4.0)
    assert "val-aux/gsm8k/half/mean" not in metrics, "only the other data source has it"


def test_a_response_that_could_not_be_scored_is_wrong_and_does_not_change_what_is_reported() -> None:
    metrics = metrics_of(1, score=[1, 2, -1], reward_extra__acc=[1, 1, NAN], failed=[0, 0, 1])
    assert metrics["val-core/gsm8k/acc/mean@1"] == 0.5
    assert metrics["val-aux/gsm8k/reward/mean@1"] == 0.0
    assert metrics["val-aux/gsm8k/failed/mean"] == 0.5
    assert "val-aux/arithmetic/failed/mean" not in metrics


def test_a_response_without_a_score_is_the_worst_of_its_data_source() -> None:
    """gsm8k: v0 has 3 and 1, v2 has 2 and none, which is 1; leaving it out would give 2 as the mean of the means."""
    metrics = metrics_of(2, score=[3, 1, -9, -9, 2, NAN], failed=[0, 0, 0, 0, 0, 1])
    assert metrics["val-core/gsm8k/reward/mean@2"] == (2 + 1.5) / 2
    assert metrics["val-core/gsm8k/reward/best@2/mean"] == 2.5
    assert metrics["val-aux/gsm8k/reward/worst@2/mean"] == 1
    assert metrics["val-aux/gsm8k/failed/mean"] == 0.25
    alone = metrics_of(1, score=[NAN, 2, NAN], failed=[1, 0, 1])
    assert alone["val-aux/gsm8k/failed/mean"] == 1
    assert not any("/gsm8k/reward/" in name for name in alone), "there is nothing to compare them with"


def test_every_prompt_has_a_seed_of_its_own_where_there_are_seeds() -> None:
    prompts = tokenized(3, 5)
    sampling = SamplingSettings(2, 1.0, 1.0, -1, 8, 0)
    first, second = (validation_requests(prompts, sampling, 7) for _ in range(2))
    assert [request.uid for request in first] == ["val-3", "val-5"]
    assert [request.sampling for request in first] == [request.sampling for request in second]
    assert first[0].sampling.seed != first[1].sampling.seed
    assert all(request.task.validation for request in first)
    greedy = SamplingSettings(1, 0.0, 1.0, -1, 8, None)
    assert [request.sampling for request in validation_requests(prompts, greedy, 7)] == [greedy, greedy]


def test_the_same_rows_are_shown_each_time() -> None:
    rows = shown_rows(100, 5, 1).tolist()
    assert (len(set(rows)), rows) == (5, sorted(rows))
    assert rows == shown_rows(100, 5, 1).tolist() != shown_rows(100, 5, 2).tolist()
    assert shown_rows(3, 5, 1).tolist() == [0, 1, 2]


def test_a_metric_to_keep_the_best_by_must_be_one() -> None:
    metrics = {"val-core/gsm8k/reward/mean@1": 0.5, "val-aux/gsm8k/truncated/mean": 0.0, "actor/loss": 1.0}
    known, key = "val-core/gsm8k/reward/mean@1", "trainer.keep_best_metric"

    def require(*overrides: str) -> None:
        require_metrics(load_config(list(overrides))[0].trainer, metrics)

    require()
    require(f"{key}={known}", f"trainer.stop_at={{metric: {known}, value: 1}}")
    with refuses(ConfigError, f"{key}=loss", known) as caught:
        require(f"{key}=loss")
    assert "val-aux" not in str(caught.value)
    with refuses(ConfigError, "trainer.stop_at.metric=val-core/gsm8k/acc/mean@1", known):
        require("trainer.stop_at={metric: val-core/gsm8k/acc/mean@1, value: 1}")


@pytest.mark.parametrize(
    ("metric", "value", "reached", "not_reached"),
    [("val-core/x/acc/mean@1", 0.9, (0.9, 0.95), (0.89, NAN)), ("val/sft/loss", 0.5, (0.5, 0.4), (0.6, NAN))],
)
def test_a_value_is_reached_from_below_and_a_loss_from_above(
    metric: str, value: float, reached: tuple[float, ...], not_reached: tuple[float, ...]
) -> None:
    stop_at = StopAtConfig(metric=metric, value=value)
    for measured in reached:
        says(why_it_ends(stop_at, {metric: measured}), metric, f"{measured:g}", f"trainer.stop_at.value={value:g}")
    assert [why_it_ends(stop_at, {metric: measured}) for measured in not_reached] == ["", ""]
    assert why_it_ends(stop_at, {}) == why_it_ends(None, {metric: reached[0]}) == ""
