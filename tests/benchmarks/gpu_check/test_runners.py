"""Two model runners of vLLM: how far they agree, and what is said where there is only one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import runners
from benchmarks.gpu_check.results import Figure, Findings, Result, write_result
from benchmarks.gpu_check.roles import OURS
from benchmarks.gpu_check.runners import agreement, note_runners
from benchmarks.gpu_check.scale import SCALES
from benchmarks.gpu_check.work import Work
from tests.messages import says

OWN = {"runner": "V2", "rate": 300.0, "sampled": [[[5, 6, 7], [-1.0, -2.0, -3.0]]]}
OTHER = {"runner": "V1", "rate": 200.0, "sampled": [[[5, 6, 9], [-1.0, -2.25, -9.0]]]}


def test_responses_count_up_to_their_first_other_token() -> None:
    """The second response differs from its second token on; the third is the same."""
    first = [[[1, 2], [-1.0, -1.0]], [[1, 2, 3], [-1.0, -1.0, -1.0]], [[4], [-0.5]]]
    second = [[[1, 2], [-1.0, -1.5]], [[1, 9, 3], [-0.75, -5.0, -9.0]], [[4], [-0.5]]]
    assert agreement(first, second) == (4, 0.5)
    assert agreement(first, first) == (6, 0.0)
    assert agreement([[[1], [-1.0]]], [[[2], [-1.0]]]) == (0, 0.0)


def test_responses_of_different_numbers_are_no_comparison() -> None:
    with pytest.raises(ValueError, match="shorter"):
        agreement([[[1, 2], [-1.0, -1.0]]], [[[1], [-1.0]]])


def noted(tmp_path: Path, own: dict[str, Any], other: dict[str, Any]) -> dict[str, Figure]:
    note_runners(work := Work("cpu", SCALES["small"], tmp_path, Findings(holds=True)), own, other)
    return {figure.what: figure for figure in work.found.figures}


def test_a_user_can_choose_between_the_two(tmp_path: Path) -> None:
    write_result(tmp_path, Result("roles", "done", {}, figures=(Figure(OURS, 150.0),)))
    found = noted(tmp_path, OWN, OTHER)
    assert {what: figure.value for what, figure in found.items()} == {
        "vLLM alone: tokens": 300.0,
        "our rollout group, of vLLM alone": 0.5,
        "vLLM alone, model runner V1: tokens": 200.0,
        "greedy tokens before V1 and V2 differ": pytest.approx(2 / 3),
        "largest difference of their log-probs": 0.25,
    }
    assert all(figure.met is None for figure in found.values())
    says(found["vLLM alone: tokens"].note, "V2")
    says(found["vLLM alone, model runner V1: tokens"].note, "VLLM_USE_V2_MODEL_RUNNER=0")


def test_a_runner_that_is_refused_is_told_with_the_reason(tmp_path: Path) -> None:
    """As on CPU."""
    found = noted(tmp_path, OWN | {"runner": "V1"}, {"runner": "V2", "refused": "Model Runner V2 requires Triton."})
    assert found["our rollout group, of vLLM alone"].value is None
    figure = found["vLLM alone, model runner V2: tokens"]
    assert figure.value is None
    says(figure.note, "Triton")
    assert len(found) == 3


def test_vllm_reads_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = pytest.importorskip("vllm.envs")
    for value, expected in (("0", False), ("1", True)):
        monkeypatch.setenv(runners.VARIABLE, value)
        assert envs.environment_variables[runners.VARIABLE]() is expected
    monkeypatch.delenv(runners.VARIABLE)
    assert envs.environment_variables[runners.VARIABLE]() is None
