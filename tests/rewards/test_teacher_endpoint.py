"""What a teacher behind an endpoint is asked, and what its answers become."""

from __future__ import annotations

import json
import math

import pytest
import torch

from grpo_dist.config.schema_roles import TeacherEndpointConfig
from grpo_dist.errors import RewardError
from grpo_dist.protocol import Ragged
from grpo_dist.rewards.teacher_endpoint import KEY, TeacherEndpoint
from tests.messages import refuses
from tests.rewards.http_service import Service


def teacher(service: Service, monkeypatch: pytest.MonkeyPatch) -> TeacherEndpoint:
    monkeypatch.setenv("TEACHER_HEADERS", '{"Authorization": "Bearer secret"}')
    monkeypatch.setattr("grpo_dist.rewards.teacher_endpoint.AT_ONCE", 1)  # so that answers come in order
    base = service.url.removesuffix("/score") + "/v1/"
    section = TeacherEndpointConfig(base_url=base, model="big", top_k=2, timeout_s=5.0, headers_env="TEACHER_HEADERS")
    return TeacherEndpoint(section)


def answer(*places: dict[int, float] | None) -> tuple[int, bytes]:
    told = [
        None if place is None else {str(i): {"logprob": x, "rank": 1} for i, x in place.items()} for place in places
    ]
    return 200, json.dumps({"choices": [{"prompt_logprobs": told}]}).encode()


PROMPTS, RESPONSES = (Ragged.from_rows(rows, torch.int32) for rows in ([[7], [7, 8]], [[4, 5], [6]]))
HALF = math.log(0.5)


def test_the_likeliest_tokens_of_each_place(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides its two likeliest tokens vLLM tells of the one that is there; equal ones come by their number."""
    service.answers = [
        answer(None, {4: -3.0, 1: -0.5, 2: -1.0}, {5: HALF, 3: HALF}),
        answer(None, {8: -0.1, 9: -3.0}, {9: -2.0, 6: -0.25}),
    ]
    columns = teacher(service, monkeypatch).columns(PROMPTS, RESPONSES)
    ids, log_probs = columns["ref_top_ids"], columns["ref_top_log_probs"]
    assert [row.tolist() for row in ids.rows()] == [[[1, 2], [3, 5]], [[6, 9]]]
    assert ids.values.dtype == torch.int32
    expected = torch.tensor([[-0.5, -1.0], [HALF, HALF], [-0.25, -2.0]])
    torch.testing.assert_close(log_probs.values, expected)
    assert service.bodies[1] == {"model": "big", "prompt": [7, 8, 6], "max_tokens": 1, "prompt_logprobs": 2}
    assert service.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    "wrong",
    [
        (200, b"{}"),
        (200, b'{"choices": [{"prompt_logprobs": null}]}'),
        answer(None, {4: -3.0, 1: -0.5}),
        answer(None, {4: -3.0, 1: -0.5}, {5: -1.0}),
        (200, b'{"choices": [{"prompt_logprobs": [null, {"x": {"logprob": 1}}, {"y": 2}]}]}'),
    ],
)
def test_a_server_that_answers_otherwise(
    wrong: tuple[int, bytes], service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.answers = [wrong]
    with refuses(RewardError, KEY, "prompt_logprobs with 2 tokens", "--max-logprobs"):
        teacher(service, monkeypatch).columns(PROMPTS[:1], RESPONSES[:1])


def test_a_server_that_refuses(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.answers = [(404, b"big: unknown")]
    with refuses(RewardError, KEY, "404", "big:"):
        teacher(service, monkeypatch).columns(PROMPTS[:1], RESPONSES[:1])
