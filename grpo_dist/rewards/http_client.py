"""One JSON request to an HTTP service, with retries. For http_reward.py.

Connection errors, timeouts and the statuses 429 and 5xx are tried again after waits that double; everything else is an
error at once. Redirects are not followed: they would take the headers to another server.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from time import sleep
from typing import Any

from grpo_dist.errors import ConfigError, RewardError

KEY = "custom_reward_function.reward_kwargs"
MOST_BYTES = 16 * 2**20  # of an answer
LONGEST_WAIT_S = 30.0


def post_json(
    url: str,
    body: Any,
    *,
    timeout_s: float = 10.0,
    retries: int = 3,
    backoff_s: float = 0.5,
    headers_env: str | None = None,
) -> Any:
    """Send JSON, return the JSON of the answer.

    Args:
        url: http or https address.
        body: what to send; arrays and numbers of numpy become lists and numbers.
        timeout_s: seconds to wait for the connection, and for each piece of the answer.
        retries: how often to try again.
        backoff_s: seconds before the first retry; doubled for each further one, up to `LONGEST_WAIT_S`.
        headers_env: environment variable with a JSON object of headers.

    Raises:
        RewardError: no answer after all retries, another status than 2xx, or no JSON.
    """
    headers = {**read_headers(headers_env), "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body, default=_to_plain).encode(), headers)
    for attempt in range(retries + 1):
        try:
            with _OPENER.open(request, timeout=timeout_s) as answer:
                return _parse(answer.read(MOST_BYTES + 1), url)
        except urllib.error.HTTPError as error:
            problem = f"status {error.code}: {show(error.read(MOST_BYTES)[:300])}"
            passing = error.code == 429 or error.code >= 500
        except (OSError, http.client.HTTPException) as error:  # URLError and TimeoutError are OSErrors
            problem, passing = f"{type(error).__name__}: {error}", True
        if not passing or attempt == retries:
            tries = "" if attempt == 0 else f" (tried {attempt + 1} times)"
            raise RewardError(f"{KEY}.url={url}: {problem}{tries}")
        sleep(min(backoff_s * 2**attempt, LONGEST_WAIT_S))
    raise AssertionError("the last attempt returned or raised")


def read_headers(variable: str | None) -> dict[str, str]:
    """The headers in an environment variable, a JSON object; none for None.

    Raises:
        ConfigError: it is not set, or holds something else; its value, which may be secret, is not shown.
    """
    if variable is None:
        return {}
    try:
        headers = json.loads(os.environ[variable])
        if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
            raise ValueError
    except (KeyError, ValueError):
        raise ConfigError(
            f"{KEY}.headers_env={variable}: that environment variable must hold a JSON object of headers, such as "
            f'{{"Authorization": "Bearer ..."}}; it {"does not" if variable in os.environ else "is not set"}'
        ) from None
    return headers


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        """Return None: the 3xx answer becomes an HTTPError."""


_OPENER = urllib.request.build_opener(_NoRedirect)


def _to_plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"ground_truth or extra_info holds a {type(value).__name__}, which JSON cannot hold")


def _parse(raw: bytes, url: str) -> Any:
    if len(raw) > MOST_BYTES:
        raise RewardError(f"{KEY}.url={url}: the answer has more than {MOST_BYTES:,} bytes")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise RewardError(f"{KEY}.url={url}: the answer is no JSON: {show(raw[:300])}") from None


def show(value: Any) -> str:
    """The value, cut to a length that fits into a message."""
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
