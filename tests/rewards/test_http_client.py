"""Retries, timeouts, headers, against a real server in a thread."""

from __future__ import annotations

import json
import socket

import pytest

from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.rewards import http_client
from grpo_dist.rewards.http_client import post_json
from tests.messages import refuses
from tests.rewards.http_service import Service


def post(service: Service, **options: object) -> object:
    return post_json(service.url, {"a": 1}, backoff_s=0.01, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_waits_double_and_the_last_failure_is_told(
    service: Service, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(http_client, "sleep", waits.append)
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
    monkeypatch.setattr(http_client, "MOST_BYTES", 10)
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
        http_client.read_headers("SCORE_HEADERS")
    assert "hush" not in str(e.value)


def test_what_json_cannot_hold(service: Service) -> None:
    with refuses(TypeError, "set", "JSON"):
        post_json(service.url, {"extra_info": {1}})
