"""Scores from an HTTP service: a judge, a reward model, a sandbox.

    custom_reward_function.path=grpo_dist.rewards.http_reward
    custom_reward_function.reward_kwargs='{url: "http://scores:8000/score", timeout_s: 10, headers_env: SCORE_HEADERS}'

One response (`compute_score`)       POST {"data_source", "solution_str", "ground_truth", "extra_info"}
                                     answer {"score": number, ...} as a reward function returns it
Many (`name: compute_score_batch`)   POST {"samples": [...]}, each as above
                                     answer {"scores": [...]}, each a number or {"score": number, ...}

Connection errors, timeouts and the statuses 429 and 5xx are tried again (http_client.py). Anything else, and the last
failure, is a RewardError: the response has failed, with a batch all of the batch's, and counts for
`reward.max_failure_rate`. Secrets stay out of the config: `headers_env` names an environment variable that holds a JSON
object of headers.
"""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.redact import redact_text
from grpo_dist.rewards.http_client import KEY, post_json, read_headers, show

# Options of `post_json`: their types, and the least value.
_OPTIONS = {"timeout_s": (int | float, 0.001), "retries": (int, 0), "backoff_s": (int | float, 0)}


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], *, url: str, **options: Any
) -> dict[str, Any]:
    """The service's score of one response.

    Args:
        data_source: sent.
        solution_str: sent.
        ground_truth: sent.
        extra_info: sent.
        url: http or https address of the service.
        **options: timeout_s, retries, backoff_s, headers_env; see `post_json`.

    Raises:
        RewardError: the service could not be reached or answered with something else.
    """
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
    """The service's scores of many responses, by one request.

    Args:
        data_sources: of each response; the others likewise.
        solution_strs: the responses.
        ground_truths: what they are compared with.
        extra_infos: anything else.
        url: http or https address of the service.
        **options: timeout_s, retries, backoff_s, headers_env; see `post_json`.

    Raises:
        RewardError: the service could not be reached, or did not answer with one score for each response.
    """
    columns = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    answer = post_json(url, {"samples": [_sample(*row) for row in columns]}, **options)
    scores = answer.get("scores") if isinstance(answer, Mapping) else None
    where = f"{KEY}.url={redact_text(url)}"
    if not isinstance(scores, list) or len(scores) != len(solution_strs):
        found = f"{len(scores)} scores" if isinstance(scores, list) else show(answer)
        raise RewardError(f'{where}: expected {{"scores": [{len(solution_strs)} of them]}}, got {found}')
    return [
        _checked_score(s if isinstance(s, Mapping) else {"score": s}, f"{where}, scores[{i}]")
        for i, s in enumerate(scores)
    ]


def check_reward_kwargs(*, url: str, headers_env: str | None = None, **options: Any) -> None:
    """Check the arguments before a run starts; the service is not asked.

    Raises:
        ConfigError: an argument does not exist or has no sensible value, or `headers_env` holds no headers.
    """
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


def _sample(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": data_source,
        "solution_str": solution_str,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
    }


def _checked_score(answer: Any, where: str) -> dict[str, Any]:
    score = answer.get("score") if isinstance(answer, Mapping) else None
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise RewardError(f'{where}: expected {{"score": number}}, got {show(answer)}')
    return dict(answer)
