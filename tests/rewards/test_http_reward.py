"""Scores, retries, timeouts and headers, against a real server in a thread; and a teacher behind an endpoint."""

import json
import math
import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.config.schema_roles import TeacherEndpointConfig
from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.protocol import Ragged
from grpo_dist.rewards import http_reward, load_reward_function, score_response
from grpo_dist.rewards.contract import Failure, Sample, score_group
from grpo_dist.rewards.http_reward import compute_score, compute_score_batch, post_json
from grpo_dist.rewards.teacher_endpoint import KEY, TeacherEndpoint
from tests.away_server import AwayServer
from tests.messages import refuses

PATH = "grpo_dist.rewards.http_reward"


class Service(AwayServer):
    """Answers each POST with the next of `answers` (status, body); keeps what it was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.url += "/score"
        self.answers, self.bodies, self.headers = list[tuple[int, bytes]](), list[Any](), list[dict[str, str]]()
        self.delay_s = 0.0

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        self.bodies.append(json.loads(body))
        self.headers.append(dict(request.headers))
        time.sleep(self.delay_s)
        return self.answers.pop(0)


@pytest.fixture
def service() -> Iterator[Service]:
    with Service().listening() as server:
        yield server


def post(service: Service, **options: Any) -> object:
    return post_json(service.url, {"a": 1}, **{"backoff_s": 0.01, **options})


def test_one_response_of_a_flaky_service(service: Service) -> None:
    service.answers = [(500, b"oops"), (429, b"slow down"), (200, b'{"score": 0.5, "fluency": 3}')]
    function = load_reward_function(PATH, "compute_score", {"url": service.url, "backoff_s": 0.01})
    row: dict[str, Any] = {"data_source": "d", "solution_str": "été", "ground_truth": "4", "extra_info": {"i": 1}}
    result = score_response(function, **row)
    assert (result.score, result.extra) == (0.5, {"fluency": 3.0})
    assert service.bodies == [row] * 3


def test_a_batch_is_one_request(service: Service) -> None:
    service.answers = [(200, b'{"scores": [1, {"score": 0.5, "acc": 0}]}')]
    truths = [np.int64(1), np.array([2, 3])]
    scores = compute_score_batch(["a", "b"], ["x", "y"], truths, [{}, {"i": 2}], url=service.url)
    assert scores == [{"score": 1}, {"score": 0.5, "acc": 0}]
    first = {"data_source": "a", "solution_str": "x", "ground_truth": 1, "extra_info": {}}
    second = {"data_source": "b", "solution_str": "y", "ground_truth": [2, 3], "extra_info": {"i": 2}}
    assert service.bodies == [{"samples": [first, second]}]


def test_an_answer_without_a_score(service: Service) -> None:
    answers = b"{}", b"[]", b'{"score": "1"}', b'{"score": true}', b'{"score": NaN}'
    for_two = b'{"scores": [1]}', b'{"score": 1}', b"[1, 2]", b'{"scores": [1, "x"]}'
    service.answers = [(200, answer) for answer in answers + for_two]
    for _ in answers:
        with refuses(RewardError, f"url={service.url}", '{"score": number}'):
            compute_score("d", "text", {"n": 4}, {"index": 1}, url=service.url)
    for _ in for_two:
        with refuses(RewardError, f"url={service.url}", "expected", "got"):
            compute_score_batch(["a"] * 2, ["x"] * 2, ["1"] * 2, [{}] * 2, url=service.url)
    assert len(service.bodies) == len(answers + for_two), "asking again would not help"


@pytest.mark.parametrize("name", ["compute_score", "compute_score_batch"])
def test_a_fault_of_the_service_fails_responses_and_one_of_the_config_the_run(
    service: Service, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORE_HEADERS", "{}")
    service.answers = [(403, b"no")] * 2
    samples = [Sample(text, "d", "4", {}, []) for text in ("a", "b")]
    function = load_reward_function(PATH, name, {"url": service.url, "headers_env": "SCORE_HEADERS"})
    for result in score_group(function, samples):
        assert isinstance(result, Failure)
        assert f"reward_kwargs.url={service.url}" in result.text
    monkeypatch.delenv("SCORE_HEADERS")
    with refuses(ConfigError, "headers_env=SCORE_HEADERS"):
        list(score_group(function, samples))


NO_URLS = ("ftp://x/y", "http://", "http://x:99999/y", "http://[x/y", "http://x/a b", "file:///etc/passwd")


def test_arguments_are_checked_before_the_run() -> None:
    for kwargs, words in (
        *(({"url": url}, ["url=", "http:// or https://"]) for url in NO_URLS),
        ({"url": "http://me:secret@x:eighty/y"}, ["url=", "https://"]),
        ({"url": "http://me:secret@x/y"}, ["credentials", "headers"]),
        ({}, ["missing", "'url'"]),
        ({"url": "http://x", "retires": 2}, ["'retires'", "url, headers_env, timeout_s, retries"]),
        ({"url": "http://x", "retries": 1.5}, ["retries=1.5", "whole number", "0"]),
        ({"url": "http://x", "timeout_s": 0}, ["timeout_s=0", "number", "0.001"]),
        ({"url": "http://x", "headers_env": "NO_SUCH_VARIABLE"}, ["headers_env=NO_SUCH_VARIABLE", "not set"]),
    ):
        with refuses(ConfigError, *words) as error:
            load_reward_function(PATH, "compute_score", kwargs)
        assert "me:secret" not in str(error.value)


def test_waits_double_and_the_last_failure_is_told(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(http_reward, "sleep", waits.append)
    service.answers = [(status, b"overloaded") for status in (500, 429, 500, 429, 503, 500)]
    with refuses(RewardError, 503, "b'overloaded'", "5 times"):
        post(service, retries=4, backoff_s=10.0)
    assert waits == [10.0, 20.0, 30.0, 30.0]
    assert len(service.bodies) == 5


def test_other_statuses_are_final(service: Service) -> None:
    statuses, service.more_headers = (400, 401, 404, 302), {"Location": service.url}
    service.answers = [(status, b"no") for status in statuses]
    for status in statuses:
        with refuses(RewardError, status, "b'no'"):
            post(service)


def test_answers_that_cannot_be_read(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in (b"", b"<html>", b"\xff", b"[" * 100_000):
        service.answers = [(200, answer)]
        with refuses(RewardError, f"url={service.url}", "JSON"):
            post(service)
    service.answers, service.more_headers = [(200, b"no gzip")], {"Content-Encoding": "gzip"}
    with refuses(RewardError, "DecodingError"):
        post(service)
    service.answers, service.more_headers = [(200, b'"0123456789"')], {}
    monkeypatch.setattr(http_reward, "MOST_BYTES", 10)
    with refuses(RewardError, f"url={service.url}", "10 bytes"):
        post(service)


def test_a_service_that_is_late_or_away(service: Service) -> None:
    service.answers, service.delay_s = [(200, b"1")] * 2, 10.0
    with refuses(RewardError, f"url={service.url}", "ReadTimeout", "2 times"):
        post(service, timeout_s=0.1, retries=1)
    with socket.socket() as deaf:  # it has the port, so that nobody else does, and does not listen
        deaf.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/"
        with refuses(RewardError, f"url={url}", "refused", "3 times"):
            post_json(url, {}, retries=2, backoff_s=0.01)


def test_headers_come_from_the_environment(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORE_HEADERS", json.dumps({"Authorization": "Bearer hush "}))
    service.answers = [(200, b"1"), (401, b"no")]
    assert post(service, headers_env="SCORE_HEADERS") == 1
    assert service.headers[0]["Authorization"] == "Bearer hush"
    with pytest.raises(RewardError) as error:
        post(service, headers_env="SCORE_HEADERS")
    assert "hush" not in str(error.value)
    for other_form in ("Bearer hush", '["hush"]', '{"a": 4, "x": "hush"}', '{"a": "Bearer\\nhush"}'):
        monkeypatch.setenv("SCORE_HEADERS", other_form)
        with refuses(ConfigError, "headers_env=SCORE_HEADERS", "JSON object") as refused:
            http_reward.read_headers("SCORE_HEADERS")
        assert "hush" not in str(refused.value)


def test_what_json_cannot_hold(service: Service) -> None:
    with refuses(TypeError, "set", "JSON"):
        post_json(service.url, {"extra_info": {1}})


# --- a teacher behind an endpoint ------------------------------------------------------------------------------------
@pytest.fixture
def teacher(service: Service, monkeypatch: pytest.MonkeyPatch) -> TeacherEndpoint:
    monkeypatch.setenv("TEACHER_HEADERS", '{"Authorization": "Bearer secret"}')
    monkeypatch.setattr("grpo_dist.rewards.teacher_endpoint.AT_ONCE", 1)  # so that answers come in order
    base = service.url.removesuffix("/score") + "/v1/"
    section = TeacherEndpointConfig(base_url=base, model="big", top_k=2, timeout_s=5.0, headers_env="TEACHER_HEADERS")
    return TeacherEndpoint(section)


def answer(*places: dict[int, float] | None) -> tuple[int, bytes]:
    told = [place and {str(i): {"logprob": x, "rank": 1} for i, x in place.items()} for place in places]
    return 200, json.dumps({"choices": [{"prompt_logprobs": told}]}).encode()


PROMPTS, RESPONSES = (Ragged.from_rows(rows, torch.int32) for rows in ([[7], [7, 8]], [[4, 5], [6]]))
HALF = math.log(0.5)


def test_the_likeliest_tokens_of_each_place(service: Service, teacher: TeacherEndpoint) -> None:
    """Besides its two likeliest tokens vLLM tells of the one that is there; equal ones come by their number."""
    service.answers = [
        answer(None, {4: -3.0, 1: -0.5, 2: -1.0}, {5: HALF, 3: HALF}),
        answer(None, {8: -0.1, 9: -3.0}, {9: -2.0, 6: -0.25}),
    ]
    columns = teacher.columns(PROMPTS, RESPONSES)
    ids, log_probs = columns["ref_top_ids"], columns["ref_top_log_probs"]
    assert [row.tolist() for row in ids.rows()] == [[[1, 2], [3, 5]], [[6, 9]]]
    assert ids.values.dtype == torch.int32
    torch.testing.assert_close(log_probs.values, torch.tensor([[-0.5, -1.0], [HALF, HALF], [-0.25, -2.0]]))
    assert service.bodies[1] == {"model": "big", "prompt": [7, 8, 6], "max_tokens": 1, "prompt_logprobs": 2}
    assert service.headers[0]["Authorization"] == "Bearer secret"


def test_a_server_that_answers_otherwise_or_refuses(service: Service, teacher: TeacherEndpoint) -> None:
    for wrong in (
        (200, b"{}"),
        (200, b'{"choices": [{"prompt_logprobs": null}]}'),
        answer(None, {4: -3.0, 1: -0.5}),
        answer(None, {4: -3.0, 1: -0.5}, {5: -1.0}),
        (200, b'{"choices": [{"prompt_logprobs": [null, {"x": {"logprob": 1}}, {"y": 2}]}]}'),
    ):
        service.answers = [wrong]
        with refuses(RewardError, KEY, "prompt_logprobs with 2 tokens", "--max-logprobs"):
            teacher.columns(PROMPTS[:1], RESPONSES[:1])
    service.answers = [(404, b"big: unknown")]
    with refuses(RewardError, KEY, "404", "big:"):
        teacher.columns(PROMPTS[:1], RESPONSES[:1])
