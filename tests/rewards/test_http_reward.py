"""Scores, retries, timeouts and headers, against a real server in a thread."""

from __future__ import annotations

import json
import socket
from typing import Any

import numpy as np
import pytest

from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.rewards import http_reward, load_reward_function, score_response
from grpo_dist.rewards.contract import Failure, Sample, score_group
from grpo_dist.rewards.http_reward import compute_score, compute_score_batch, post_json
from tests.messages import refuses
from tests.rewards.http_service import Service

PATH = "grpo_dist.rewards.http_reward"


def score(service: Service, **options: Any) -> dict[str, Any]:
    return compute_score("d", "text", {"n": 4}, {"index": 1}, url=service.url, backoff_s=0.01, **options)


def test_one_response(service: Service) -> None:
    service.answers = [(200, b'{"score": 0.5, "fluency": 3}')]
    function = load_reward_function(PATH, "compute_score", {"url": service.url})
    result = score_response(function, data_source="d", solution_str="été", ground_truth="4", extra_info={"i": 1})
    assert (result.score, result.extra) == (0.5, {"fluency": 3.0})
    assert service.bodies == [{"data_source": "d", "solution_str": "été", "ground_truth": "4", "extra_info": {"i": 1}}]


def test_a_batch_is_one_request(service: Service) -> None:
    service.answers = [(200, b'{"scores": [1, {"score": 0.5, "acc": 0}]}')]
    function = load_reward_function(PATH, "compute_score", {"url": service.url})
    scores = compute_score_batch(
        data_sources=["a", "b"],
        solution_strs=["x", "y"],
        ground_truths=[np.int64(1), np.array([2, 3])],
        extra_infos=[{}, {"i": 2}],
        **function.reward_kwargs,
    )
    assert scores == [{"score": 1}, {"score": 0.5, "acc": 0}]
    assert service.bodies == [
        {
            "samples": [
                {"data_source": "a", "solution_str": "x", "ground_truth": 1, "extra_info": {}},
                {"data_source": "b", "solution_str": "y", "ground_truth": [2, 3], "extra_info": {"i": 2}},
            ]
        }
    ]


@pytest.mark.parametrize(
    "answer", [b'{"scores": [1]}', b'{"scores": [1, 2, 3]}', b'{"score": 1}', b"[1, 2]", b'{"scores": [1, "x"]}']
)
def test_a_batch_with_other_scores_is_an_error(service: Service, answer: bytes) -> None:
    service.answers = [(200, answer)]
    with refuses(RewardError, f"url={service.url}", "expected", "got"):
        compute_score_batch(["a"] * 2, ["x"] * 2, ["1"] * 2, [{}] * 2, url=service.url)


@pytest.mark.parametrize(
    "answer", [b"{}", b"[]", b"1", b'{"score": null}', b'{"score": "1"}', b'{"score": true}', b'{"score": NaN}']
)
def test_an_answer_without_a_score(service: Service, answer: bytes) -> None:
    service.answers = [(200, answer)]
    with refuses(RewardError, '{"score": number}'):
        score(service)
    assert len(service.bodies) == 1  # asking again would not help


def test_a_flaky_service(service: Service) -> None:
    service.answers = [(500, b"oops"), (429, b"slow down"), (200, b'{"score": 1}')]
    assert score(service)["score"] == 1
    assert len(service.bodies) == 3


FAULTS = {
    "an error": [(500, b"oops")] * 2,
    "refused": [(403, b"no")],
    "no JSON": [(200, b"<html>")],
    "no score": [(200, b"{}")],
    "null": [(200, b"null")],
}


@pytest.mark.parametrize("name", ["compute_score", "compute_score_batch"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_service_is_a_failed_response_in_both_forms(service: Service, name: str, fault: str) -> None:
    service.answers = FAULTS[fault] * 2
    function = load_reward_function(PATH, name, {"url": service.url, "retries": 1, "backoff_s": 0.01})
    results = list(score_group(function, [Sample(text, "d", "4", {}, []) for text in ("a", "b")]))
    assert [isinstance(result, Failure) for result in results] == [True, True]
    assert all(f"reward_kwargs.url={service.url}" in result.text for result in results)


@pytest.mark.parametrize("name", ["compute_score", "compute_score_batch"])
def test_a_service_that_is_down_or_late_is_a_failed_response_in_both_forms(service: Service, name: str) -> None:
    service.delay_s, service.answers = 10.0, [(200, b"{}")] * 2
    late = {"url": service.url, "retries": 0, "timeout_s": 0.1}
    with socket.socket() as deaf:  # it has the port, and does not listen
        deaf.bind(("127.0.0.1", 0))
        down = {"url": f"http://127.0.0.1:{deaf.getsockname()[1]}/", "retries": 0}
        for kwargs in (late, down):
            function = load_reward_function(PATH, name, kwargs)
            results = list(score_group(function, [Sample(text, "d", "4", {}, []) for text in ("a", "b")]))
            assert [isinstance(result, Failure) for result in results] == [True, True]


@pytest.mark.parametrize("name", ["compute_score", "compute_score_batch"])
def test_a_mistake_in_the_config_stops_the_run_in_both_forms(
    service: Service, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment of the reward process lacks what the driver's had."""
    monkeypatch.setenv("SCORE_HEADERS", "{}")
    function = load_reward_function(PATH, name, {"url": service.url, "headers_env": "SCORE_HEADERS"})
    monkeypatch.delenv("SCORE_HEADERS")
    with refuses(ConfigError, "headers_env=SCORE_HEADERS"):
        list(score_group(function, [Sample("a", "d", "4", {}, [])]))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"url": "ftp://x/y"}, ["url=", "http:// or https://"]),
        ({"url": "http://"}, ["url=", "https://"]),
        ({"url": "http://x:eighty/y"}, ["url=", "https://"]),
        ({"url": "http://x:99999/y"}, ["url=", "https://"]),
        ({"url": "http://[x/y"}, ["url=", "https://"]),
        ({"url": "http://me:secret@x:eighty/y"}, ["url=", "https://"]),
        ({"url": "http://x/a b"}, ["url=", "https://"]),
        ({"url": "file:///etc/passwd"}, ["url=", "https://"]),
        ({"url": "http://me:secret@x/y"}, ["credentials", "headers"]),
        ({}, ["missing", "'url'"]),
        ({"url": "http://x", "retires": 2}, ["'retires'", "url, headers_env, timeout_s, retries"]),
        ({"url": "http://x", "retries": 1.5}, ["retries=1.5", "whole number", "0"]),
        ({"url": "http://x", "timeout_s": 0}, ["timeout_s=0", "number", "0.001"]),
        ({"url": "http://x", "headers_env": "NO_SUCH_VARIABLE"}, ["headers_env=NO_SUCH_VARIABLE", "not set"]),
    ],
)
def test_arguments_are_checked_before_the_run(kwargs: dict, words: list[str]) -> None:
    with refuses(ConfigError, *words) as error:
        load_reward_function(PATH, "compute_score", kwargs)
    assert "me:secret" not in str(error.value)


def post(service: Service, **options: object) -> object:
    return post_json(service.url, {"a": 1}, backoff_s=0.01, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_waits_double_and_the_last_failure_is_told(
    service: Service, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(http_reward, "sleep", waits.append)
    service.answers = [(status, b"overloaded")] * 9
    with refuses(RewardError, status, "b'overloaded'", "5 times"):
        post_json(service.url, {}, retries=4, backoff_s=10.0)
    assert waits == [10.0, 20.0, 30.0, 30.0]
    assert len(service.bodies) == 5


def test_an_answer_that_cannot_be_unpacked(service: Service) -> None:
    service.answers, service.more_headers = [(200, b"no gzip")] * 9, {"Content-Encoding": "gzip"}
    with pytest.raises(RewardError, match="DecodingError"):
        post(service)
    assert len(service.bodies) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 302])
def test_other_statuses_are_final(service: Service, status: int) -> None:
    service.answers = [(status, b"no")] * 9
    with refuses(RewardError, status, "b'no'"):
        post(service)
    assert len(service.bodies) == 1


@pytest.mark.parametrize("answer", [b"", b"<html>", b"{", b"\xff", b"[" * 100_000])
def test_no_json(service: Service, answer: bytes) -> None:
    service.answers = [(200, answer)]
    with refuses(RewardError, f"url={service.url}", "JSON"):
        post(service)


def test_an_answer_too_large(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_reward, "MOST_BYTES", 10)
    service.answers = [(200, b'"0123456789"')]
    with refuses(RewardError, f"url={service.url}", "10 bytes"):
        post(service)


def test_a_service_that_does_not_answer_in_time(service: Service) -> None:
    service.answers, service.delay_s = [(200, b"1")] * 2, 10.0
    with refuses(RewardError, f"url={service.url}", "ReadTimeout", "2 times"):
        post(service, timeout_s=0.1, retries=1)


def test_nobody_there() -> None:
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


@pytest.mark.parametrize(
    "value", ["Bearer hush", '["hush"]', '{"Authorization": 4, "x": "hush"}', '{"Authorization": "Bearer\\nhush"}']
)
def test_headers_of_another_form_are_not_shown(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SCORE_HEADERS", value)
    with refuses(ConfigError, "headers_env=SCORE_HEADERS", "JSON object") as e:
        http_reward.read_headers("SCORE_HEADERS")
    assert "hush" not in str(e.value)


def test_what_json_cannot_hold(service: Service) -> None:
    with refuses(TypeError, "set", "JSON"):
        post_json(service.url, {"extra_info": {1}})
