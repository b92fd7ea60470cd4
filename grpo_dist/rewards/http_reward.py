"""Scores from an HTTP service: a judge, a reward model, a sandbox.

    custom_reward_function.path=grpo_dist.rewards.http_reward
    custom_reward_function.reward_kwargs='{url: "http://scores:8000/score", timeout_s: 10, headers_env: SCORE_HEADERS}'

One response (`compute_score`)       POST {"data_source", "solution_str", "ground_truth", "extra_info"}
                                     answer {"score": number, ...} as a reward function returns it
Many (`name: compute_score_batch`)   POST {"samples": [...]}, each as above
                                     answer {"scores": [...]}, each a number or {"score": number, ...}

Connection errors, timeouts and the statuses 429 and 5xx are tried again after waits that double. Anything else, and the
last failure, is a RewardError: the response has failed, with a batch all of the batch's, and counts for
`reward.max_failure_rate`. Redirects are not followed: they would take the headers to another server. Secrets stay
out of the config: `headers_env` names an environment variable that holds a JSON object of headers.
"""

from __future__ import annotations

import json
import math
import os
import ssl
import urllib.parse
from collections.abc import Mapping, Sequence
from functools import cache
from time import sleep
from typing import Any

import httpx

from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.redact import redact_text

KEY = "custom_reward_function.reward_kwargs"
MOST_BYTES = 16 * 2**20  # of an answer
LONGEST_WAIT_S = 30.0
# Options of `post_json`: their types, and the least value.
_OPTIONS = {"timeout_s": (int | float, 0.001), "retries": (int, 0), "backoff_s": (int | float, 0)}


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], *, url: str, **options: Any
) -> dict[str, Any]:
    """Return the service's score of one response; the options are those of `post_json`, which also explains them."""
    answer = post_json(url, _sample(data_source, solution_str, ground_truth, extra_info), **options)
    return _checked_score(answer, f"{KEY}.url={redact_text(url)}")


def compute_score_batch(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[dict[str, Any]],
    *,
    url: str,
    **options: Any,
) -> list[dict[str, Any]]:
    """Return the service's scores of many responses, by one request; see `compute_score`."""
    columns = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    answer = post_json(url, {"samples": [_sample(*row) for row in columns]}, **options)
    scores = answer.get("scores") if isinstance(answer, Mapping) else None
    where = f"{KEY}.url={redact_text(url)}"
    if not isinstance(scores, list) or len(scores) != len(solution_strs):
        given = f"{len(scores)} scores" if isinstance(scores, list) else show(answer)
        raise RewardError(f'{where}: expected {{"scores": [{len(solution_strs)} of them]}}, got {given}')
    return [
        _checked_score(s if isinstance(s, Mapping) else {"score": s}, f"{where}, scores[{i}]")
        for i, s in enumerate(scores)
    ]


def check_reward_kwargs(*, url: str, headers_env: str | None = None, **options: Any) -> None:
    """Check the arguments before a run starts; the service is not asked."""
    try:
        parts = urllib.parse.urlsplit(str(url))
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is no number
        is_address = False
    if not is_address or not str(url).isprintable() or " " in str(url):
        raise ConfigError(f"{KEY}.url={redact_text(str(url))!r}: must be an http:// or https:// address")
    if "@" in parts.netloc:
        raise ConfigError(f"{KEY}.url: holds a user name; put credentials into the headers of {KEY}.headers_env")
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ConfigError(f"{KEY} has no {name!r}; there are url, headers_env, {', '.join(_OPTIONS)}")
        kind, least = _OPTIONS[name]
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < math.inf:
            whole = "whole " if kind is int else ""
            raise ConfigError(f"{KEY}.{name}={value!r}: must be a {whole}number, at least {least}")
    read_headers(headers_env)


def post_json(
    url: str,
    body: Any,
    *,
    timeout_s: float = 10.0,
    retries: int = 3,
    backoff_s: float = 0.5,
    headers_env: str | None = None,
    key: str = f"{KEY}.url",
) -> Any:
    """Send JSON, return the JSON of the answer.

    Args:
        body: what to send; arrays and numbers of numpy become lists and numbers.
        timeout_s: seconds to wait for the connection, and for each piece of the answer.
        backoff_s: seconds before the first retry; doubled for each further one, up to `LONGEST_WAIT_S`.
        headers_env: environment variable with a JSON object of headers.

    Raises:
        RewardError: no answer after all retries, another status than 2xx, or no JSON.
    """
    headers = {**read_headers(headers_env, key.rpartition(".")[0]), "Content-Type": "application/json"}
    content = json.dumps(body, default=_to_plain).encode()
    for attempt in range(retries + 1):
        try:
            with _client().stream("POST", url, content=content, headers=headers, timeout=timeout_s) as answer:
                raw = next(answer.iter_bytes(MOST_BYTES + 1), b"")
            if answer.is_success:
                return _parse(raw, f"{key}={redact_text(url)}")
            problem = f"status {answer.status_code}: {show(raw[:300])}"
            passing = answer.status_code == 429 or answer.status_code >= 500
        except httpx.RequestError as error:  # connection, timeout, protocol; or an answer that cannot be unpacked
            problem, passing = f"{type(error).__name__}: {error}", isinstance(error, httpx.TransportError)
        if not passing or attempt == retries:
            tries = "" if attempt == 0 else f" (tried {attempt + 1} times)"
            raise RewardError(f"{key}={redact_text(url)}: {problem}{tries}")
        sleep(min(backoff_s * 2**attempt, LONGEST_WAIT_S))
    raise AssertionError("the last attempt returned or raised")


def read_headers(variable: str | None, section: str = KEY) -> dict[str, str]:
    """Return the headers in an environment variable, a JSON object, that `section`.headers_env names; none for None.

    Raises:
        ConfigError: it is not set, or holds something else; its value, which may be secret, is not shown.
    """
    if variable is None:
        return {}
    try:
        headers = json.loads(os.environ[variable])
        # A line break is refused here, since the HTTP library would refuse it with a message that shows the value.
        if not all(isinstance(value, str) and value.isprintable() for value in headers.values()):
            raise ValueError
    except (KeyError, ValueError, AttributeError):
        raise ConfigError(
            f"{section}.headers_env={variable}: that environment variable must hold a JSON object of headers, such as "
            f'{{"Authorization": "Bearer ..."}}; it {"does not" if variable in os.environ else "is not set"}'
        ) from None
    return {name: value.strip() for name, value in headers.items()}


@cache
def _client() -> httpx.Client:
    """Return the client, which keeps connections open for the next request; trusts the certificates of the system."""
    return httpx.Client(verify=ssl.create_default_context())


def _to_plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"ground_truth or extra_info holds a {type(value).__name__}, which JSON cannot hold")


def _parse(raw: bytes, where: str) -> Any:
    if len(raw) > MOST_BYTES:
        raise RewardError(f"{where}: the answer has more than {MOST_BYTES:,} bytes")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise RewardError(f"{where}: the answer is no JSON: {show(raw[:300])}") from None


def show(value: Any) -> str:
    """Return the value, cut to a length that fits into a message."""
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _sample(*row: Any) -> dict[str, Any]:
    return dict(zip(("data_source", "solution_str", "ground_truth", "extra_info"), row, strict=True))


def _checked_score(answer: Any, where: str) -> dict[str, Any]:
    score = answer.get("score") if isinstance(answer, Mapping) else None
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise RewardError(f'{where}: expected {{"score": number}}, got {show(answer)}')
    return dict(answer)
