"""Removes secrets from configs and texts before they are printed, logged or sent to a tracking service."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "***"

# Whole words of a key only: `ppo_max_token_len_per_gpu` and `tokenizer` hold no secret, `hf_token` does.
_SECRET_KEY = re.compile(
    r"(^|[_.\-])(secret|password|passwd|passphrase|credentials?|authorization|cookie|apikey|(api|access|private|secret)[_\-]?key)"
    r"([_.\-]|$)|(^|[_.\-])(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)token$",
    re.IGNORECASE,
)
# Values that are secrets under any key: Hugging Face, OpenAI-like, GitHub and AWS keys.
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_\-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16})\b"
)
# A name, = or :, and a value in quotes or up to the next delimiter, as on a command line, in YAML or in Python.
_ASSIGNED = re.compile(
    r"""(?<![\w.\-])(?P<name>[\w.\-]+)(?P<sign>["']?\s*[=:]\s*)"""
    r"""(?P<value>"[^"]*"|'[^']*'|(?:(?:Bearer|Basic)\s+)?[^\s,"'{}\[\]]*[^\s,"'{}\[\]:])""",
    re.IGNORECASE,
)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def redact(value: Any) -> Any:
    """A deep copy of `value` as plain dicts and lists, with secrets replaced by `***`.

    A value is a secret if its key says so (password, api_key, hf_token ...), if it has the form of a known access key,
    or if it is the login part of a URL.
    """
    if isinstance(value, Mapping):
        return {key: REDACTED if _is_secret(str(key), item) else redact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if isinstance(value, str):
        return _URL_LOGIN.sub(REDACTED, _SECRET_VALUE.sub(REDACTED, value))
    return value


def redact_text(text: str) -> str:
    """A text with secrets replaced: values after a secret's name and `=` or `:`, and those that `redact` recognizes."""
    return str(redact(_ASSIGNED.sub(_without_value, text)))


def _without_value(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    return name + found["sign"] + (REDACTED if _SECRET_KEY.search(name) else _ASSIGNED.sub(_without_value, value))


def _is_secret(key: str, value: Any) -> bool:
    # An unset secret stays visible as unset; a section named "credentials" is hidden as a whole.
    return value is not None and value != "" and _SECRET_KEY.search(key) is not None
