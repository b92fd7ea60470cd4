"""Every number here is worked out from the ratios e^lambda = pi_old / pi_rollout of the tokens; verl's too."""

import math

import pytest
import torch
import yaml

from grpo_dist.algorithms import compute_rollout_correction
from grpo_dist.algorithms.correction import (
    LEVELS,
    REJECTIONS,
    current_weights,
    kpop,
    read_bounds,
    read_rejections,
    read_weight_bounds,
)
from grpo_dist.errors import BatchError, ConfigError
from tests.golden import correction, tensors
from tests.messages import refuses

# Two responses: ratios 2, 0.5, 4 and 1, (masked). The sampler gave every token 0.1.
RATIOS = torch.tensor([[2.0, 0.5, 4.0], [1.0, 7.0, 7.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
ROLLOUT = torch.full((2, 3), math.log(0.1))
OLD = ROLLOUT + RATIOS.log()
COLUMNS = {"old_log_probs": OLD, "rollout_log_probs": ROLLOUT, "response_mask": MASK}


def correct(**options: object) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, float]]:
    return compute_rollout_correction(**COLUMNS | options)


@pytest.mark.parametrize(
    ("level", "threshold", "normalised", "expected"),
    [
        ("token", 3.0, False, [[2.0, 0.5, 3.0], [1, 1, 1]]),  # truncated
        ("sequence", 3.0, False, [[3.0, 3.0, 3.0], [1, 1, 1]]),  # 2 * 0.5 * 4 = 4, truncated
        ("token", "0.6_3", False, [[2.0, 0.0, 0.0], [1, 1, 1]]),  # IcePop zeroes what is outside
        ("token", 3.0, True, [[2 / 1.625, 0.5 / 1.625, 3 / 1.625], [1 / 1.625, 1, 1]]),  # mean (2 + 0.5 + 3 + 1) / 4
        ("sequence", 3.0, True, [[1.5, 1.5, 1.5], [0.5, 1, 1]]),  # mean (3 + 1) / 2
    ],
)
def test_weights_by_hand(level: str, threshold: float | str, normalised: bool, expected: list) -> None:
    """All tokens still count."""
    options = {"rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalised}
    weights, mask, metrics = correct(rollout_is=level, **options)
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert mask.tolist() == MASK.tolist()
    out_of_band = {"rollout_corr/rollout_is_oob_ratio": 0.5} if threshold == "0.6_3" else {}
    assert {name: value for name, value in metrics.items() if "oob" in name} == out_of_band


@pytest.mark.parametrize(
    ("name", "threshold", "expected"),
    [
        ("token_k1", 3.0, [[1, 1, 0], [1, 0, 0]]),  # 1/3 to 3
        ("token_k1", "0.6_5", [[0, 1, 0], [1, 0, 0]]),  # the inverse ratios are 0.5, 2, 0.25 and 1
        ("token_k2", 0.5, [[1, 1, 0], [1, 0, 0]]),  # ln(2)^2 / 2 = 0.24 twice, ln(4)^2 / 2 = 0.96
        ("token_k3", 0.25, [[0, 1, 0], [1, 0, 0]]),  # 2 - 1 - ln 2 = 0.307, 0.5 - 1 + ln 2 = 0.193, 4 - 1 - ln 4
        ("seq_sum_k1", 3.9, [[0, 0, 0], [1, 0, 0]]),  # the product is 4
        ("seq_sum_k1", 4.1, [[1, 1, 1], [1, 0, 0]]),
        ("seq_sum_k1", "0.2_1.1", [[1, 1, 1], [1, 0, 0]]),  # its inverse is 1/4
        ("seq_sum_k1", "0.9_5", [[0, 0, 0], [1, 0, 0]]),
        ("seq_mean_k1", "0.6_1.1", [[1, 1, 1], [1, 0, 0]]),  # the inverse of the geometric mean is 0.63
        ("seq_mean_k1", "0.9_1.7", [[0, 0, 0], [1, 0, 0]]),
        ("seq_mean_k1", 1.5, [[0, 0, 0], [1, 0, 0]]),  # the geometric mean is 4^(1/3) = 1.587
        ("seq_mean_k1", 1.6, [[1, 1, 1], [1, 0, 0]]),
        ("seq_sum_k2", 1.4, [[0, 0, 0], [1, 0, 0]]),  # 0.24 + 0.24 + 0.961 = 1.441
        ("seq_mean_k2", 0.49, [[1, 1, 1], [1, 0, 0]]),  # / 3 = 0.480
        ("seq_mean_k3", 0.7, [[0, 0, 0], [1, 0, 0]]),  # (0.307 + 0.193 + 1.614) / 3 = 0.705
        ("seq_max_k2", 0.97, [[1, 1, 1], [1, 0, 0]]),
        ("seq_max_k3", 1.6, [[0, 0, 0], [1, 0, 0]]),
        ("token_k2,seq_max_k3", "0.5,2", [[1, 1, 0], [1, 0, 0]]),
        ("token_kpop", 0.1, [[1, 1, 0], [1, 0, 0]]),  # 0.0444, 0.0207 and 0.3112: see below
        ("token_kpop", 0.03, [[0, 1, 0], [1, 0, 0]]),
        ("token_kpop", 0.02, [[0, 0, 0], [1, 0, 0]]),
        ("token_kpop,token_k1", "0.1,1.5", [[0, 0, 0], [1, 0, 0]]),
        ("token_k1,token_k1", "1.5,8", [[0, 0, 0], [1, 0, 0]]),
    ],
)
def test_rejection(name: str, threshold: float | str, expected: list) -> None:
    """Tokens, and the share of the four that goes."""
    _, mask, metrics = correct(rollout_rs=name, rollout_rs_threshold=threshold)
    assert mask.tolist() == expected
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1 - mask.sum() / 4


def test_weights_and_rejection_are_verls() -> None:
    golden = correction()
    inputs = tensors(golden["inputs"])
    names = {case["name"] for case in golden["cases"]}
    assert names >= {*REJECTIONS, *LEVELS} - {"token_kpop"}  # which verl has not
    for case in golden["cases"]:
        weights, mask, metrics = compute_rollout_correction(**inputs, **case["config"])
        expected = case["outputs"]
        assert mask.tolist() == expected["mask"], case["config"]
        if "weights" in expected:
            trained = inputs["response_mask"] > 0  # verl's are 0 elsewhere
            torch.testing.assert_close(weights[trained], torch.tensor(expected["weights"])[trained], rtol=1e-5, atol=0)
        for name, value in expected.get("metrics", {}).items():
            assert metrics[name] == pytest.approx(value, rel=1e-4), (name, case["config"])


def test_kpop_stays_finite() -> None:
    sure, never = torch.tensor([0.0, 0.0, -1e-7]), torch.tensor([-1.0, -200.0, -math.inf])
    assert kpop(sure, never).isfinite().all()
    assert kpop(sure, sure).tolist() == [0, 0, 0]


def test_each_name_reports_what_it_leaves_out() -> None:
    """Of four tokens kpop rejects the one of ratio 4, k1 the three whose ratios are not 1, together they reject 3."""
    _, mask, metrics = correct(rollout_rs="token_kpop,token_k1", rollout_rs_threshold="0.1,1.5")
    assert mask.tolist() == [[0, 0, 0], [1, 0, 0]]
    found = [metrics[f"rollout_corr/{name}_masked_fraction"] for name in ("token_kpop", "token_k1", "rollout_rs")]
    assert found == [0.25, 0.75, 0.75]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [2.0, 0.5, 3.0, 1.0]),  # truncated at 3
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 3.0}, [2.0, 0.5, 0.0, 1.0]),  # within 1/3 and 3
        ({"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": 3.0}, [1.0, 1.0, 0.0, 1.0]),
    ],
)
def test_current_weights_are_zero_on_rejected_tokens(changes: dict, expected: list[float]) -> None:
    options = {"rollout_is": "token", "rollout_is_threshold": 3.0, "rollout_rs": None, "rollout_rs_threshold": None}
    weights = current_weights(OLD.clone().requires_grad_(), ROLLOUT, MASK, options | changes)
    torch.testing.assert_close(weights[MASK > 0], torch.tensor(expected))
    assert not weights.requires_grad


def test_diagnostics_by_hand() -> None:
    """Probabilities 0.2, 0.05, 0.4, 0.1 against 0.1 each; perplexities: (0.2 0.05 0.4)^(-1/3) and 10, against 10."""
    weights, _, metrics = correct()
    assert weights is None
    logs = [math.log(2), -math.log(2), math.log(4), 0.0]
    pairs = list(zip([2.0, 0.5, 4.0, 1.0], logs, strict=True))
    first = 0.004 ** (-1 / 3)
    expected = {
        "training/rollout_probs_diff_mean": (0.1 + 0.05 + 0.3 + 0) / 4,
        "training/rollout_probs_diff_max": 0.3,
        "rollout_corr/kl": -sum(logs) / 4,
        "rollout_corr/k3_kl": sum(ratio - 1 - log for ratio, log in pairs) / 4,
        "rollout_corr/reverse_kl": sum(ratio * log for ratio, log in pairs) / 4,
        "rollout_corr/training_ppl": (first + 10) / 2,
        "rollout_corr/rollout_ppl": 10,
        "rollout_corr/training_log_ppl": (math.log(first) + math.log(10)) / 2,
        "rollout_corr/rollout_log_ppl": math.log(10),
        "rollout_corr/ppl_ratio": (first / 10 + 1) / 2,
        "rollout_corr/chi2_token": (4 + 0.25 + 16 + 1) / 4 - 1,
        "rollout_corr/chi2_seq": (16 + 1) / 2 - 1,
        "rollout_corr/eff_sample_size": 7.5**2 / (4 * 21.25),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("old", "mask", "level"), [(OLD, MASK * 0, "token"), (OLD - 1000, MASK, "sequence"), (ROLLOUT, MASK, "sequence")]
)
def test_an_empty_mask_and_huge_differences_stay_finite(old: torch.Tensor, mask: torch.Tensor, level: str) -> None:
    options = {"rollout_is": level, "rollout_rs": "token_k1", "rollout_rs_threshold": 1.001}
    weights, kept, metrics = correct(old_log_probs=old, response_mask=mask, **options)
    assert torch.isfinite(weights).all()
    assert all(math.isfinite(value) for value in metrics.values())
    if old is ROLLOUT:
        assert torch.equal(weights, torch.ones(2, 3))
        assert kept.tolist() == MASK.tolist()
        assert metrics["rollout_corr/eff_sample_size"] == 1


def test_bounds_are_read() -> None:
    assert read_bounds(2.0, key="k") == (None, 2.0)
    assert read_weight_bounds(1) == (None, 1.0)
    assert read_bounds("0.5_5", key="k") == read_weight_bounds("0.5_5.0") == (0.5, 5.0)
    assert read_rejections("token_k1, seq_max_k2", "2,0.1") == [("token_k1", (0.5, 2.0)), ("seq_max_k2", (None, 0.1))]
    assert len(read_rejections(",".join(REJECTIONS), 1.1)) == len(REJECTIONS)
    assert read_rejections("token_kpop", 0.1) == [("token_kpop", (None, 0.1))]
    assert read_rejections(None, None) == []


def test_mistakes_are_named() -> None:
    for bounds in ("two", "5_0.5", "1_2_3", "-1", "0", "nan", ""):
        with refuses(ConfigError, "lower_upper"):
            read_bounds(bounds, key="algorithm.rollout_correction.rollout_is_threshold")
    (found,) = yaml.safe_load("- 0.5_5")  # two bounds that YAML takes for one number
    with refuses(ConfigError, "rollout_is_threshold=0.55", "0.5_5.0"):
        read_weight_bounds(found)
    with refuses(ConfigError, "rollout_is=tokens", "token, sequence"):
        correct(rollout_is="tokens")
    with refuses(ConfigError, "rollout_rs=token_k4"):
        correct(rollout_rs="token_k4", rollout_rs_threshold=1)
    for threshold in (1, 0.5):  # one number that leaves no ratio between 1/C and C
        with refuses(ConfigError, f"rollout_rs_threshold={threshold}", "seq_mean_k1", "lower_upper"):
            correct(rollout_rs="seq_mean_k1", rollout_rs_threshold=threshold)
    with refuses(ConfigError, "rollout_rs_threshold=None"):
        correct(rollout_rs="token_k1")
    for name in ("token_k2", "token_kpop"):
        with refuses(ConfigError, name, "one upper"):
            correct(rollout_rs=name, rollout_rs_threshold="0.1_0.2")
    with refuses(BatchError, "rollout_log_probs"):
        correct(rollout_log_probs=ROLLOUT[:1])
