import numpy as np
import pytest

from grpo_dist.trainer.metrics import performance_metrics, zero_variance_share


def test_zero_variance_share() -> None:
    assert zero_variance_share(np.array([1, 1, 0, 1, 5.0]), np.array(["a", "a", "b", "b", "c"])) == pytest.approx(2 / 3)


def test_throughput_by_hand() -> None:
    timings = {"step": 4.0, "gen": 2.0, "update_actor": 1.0}
    metrics = {"perf/total_num_tokens": 1000.0, "response_length/mean": 30.0, "prompt_length/mean": 10.0}
    performance = performance_metrics(timings, metrics)
    assert performance["perf/throughput"] == 250
    assert performance["perf/generation_tokens_per_s"] == 375
    assert performance["perf/update_tokens_per_s"] == 1000
    assert performance["timing_s/gen"] == 2.0
    del timings["gen"]  # all of it came out of a checkpoint
    assert "perf/generation_tokens_per_s" not in performance_metrics(timings, metrics)
