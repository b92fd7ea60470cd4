"""One JSON request to an HTTP service, with retries. For http_reward.py.

Connection errors, timeouts and the statuses 429 and 5xx are tried again after waits that double; everything else is an
error at once. Redirects are not followed: they would take the headers to another server.
"""

from __future__ import annotations

import json
import os
import ssl
from functools import cache
from time import sleep
from typing import Any

import httpx

from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.redact import redact_text

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
    content = json.dumps(body, default=_to_plain).encode()
    for attempt in range(retries + 1):
        try:
            with _client().stream("POST", url, content=content, headers=headers, timeout=timeout_s) as answer:
                raw = next(answer.iter_bytes(MOST_BYTES + 1), b"")
            if answer.is_success:
                return _parse(raw, url)
            problem = f"status {answer.status_code}: {show(raw[:300])}"
            passing = answer.status_code == 429 or answer.status_code >= 500
        except httpx.RequestError as error:  # connection, timeout, protocol; or an answer that cannot be unpacked
            problem, passing = f"{type(error).__name__}: {error}", isinstance(error, httpx.TransportError)
        if not passing or attempt == retries:
            tries = "" if attempt == 0 else f" (tried {attempt + 1} times)"
            raise RewardError(f"{KEY}.url={redact_text(url)}: {problem}{tries}")
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
        # A line break is refused here, since the HTTP library would refuse it with a message that shows the value.
        if not all(isinstance(value, str) and value.isprintable() for value in headers.values()):
            raise ValueError
    except (KeyError, ValueError, AttributeError):
        raise ConfigError(
            f"{KEY}.headers_env={variable}: that environment variable must hold a JSON object of headers, such as "
            f'{{"Authorization": "Bearer ..."}}; it {"does not" if variable in os.environ else "is not set"}'
        ) from None
    return {name: value.strip() for name, value in headers.items()}


@cache
def _client() -> httpx.Client:
    """Keeps connections open for the next request; trusts the certificates of the system."""
    return httpx.Client(verify=ssl.create_default_context())


def _to_plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"ground_truth or extra_info holds a {type(value).__name__}, which JSON cannot hold")


def _parse(raw: bytes, url: str) -> Any:
    if len(raw) > MOST_BYTES:
        raise RewardError(f"{KEY}.url={redact_text(url)}: the answer has more than {MOST_BYTES:,} bytes")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise RewardError(f"{KEY}.url={redact_text(url)}: the answer is no JSON: {show(raw[:300])}") from None


def show(value: Any) -> str:
    """The value, cut to a length that fits into a message."""
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
