"""Removes secrets from configs and texts before they are printed, logged or sent to a tracking service.

A secret is known by the name it is given to (`api_key`, `clientSecret`, `--token`, `?sig=`), by its own form (GitHub's,
Slack's, ... tokens), or because the config took it from the environment.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

REDACTED = "***"
_STAND_IN = "a1b2c3d4e5f6g7h8"  # in the place of one: redacted again, where a name, an option or a URL says so

# Parts of a word of a name: the whole name is of a secret, wherever in it they stand.
_SECRET_WORD = re.compile(
    r"secret|passw|passphrase|pwd|credential|authorization|bearer|cookie|(api|access|auth|private)(key|token)"
)
_SECRET_PAIR = re.compile(
    r"(?<![a-z])(access|account|api|auth|client|encryption|master|private|refresh|service|session|signing|ssh|"
    r"subscription)_(key|token)s?(?![a-z])"
)
# Last words of a name that mean a secret, unless the word before says what they are the key or token of.
_LAST_WORDS = {
    "key": "answer audio best cache chosen column conversation data dataset dict field fn foreign group hash id image "
    "images index input label labels map message messages metric name output parallel partition primary prompt query "
    "question rejected response reward row score sequence sort source state target text tool tools truth uid value "
    "video",
    "token": "additional assistant audio bad batched boi bos by call class cls decoder each end eoi eom eos eot fim "
    "first good image label last mask max mean middle min new newline next num pad per pooling prefix prev sep "
    "separator special split start step stop suffix sum system think thinking tool unk user video",
    **dict.fromkeys(("auth", "jwt", "pat", "pw", "sig", "signature"), ""),
}
_ORDINARY = {last: frozenset(words.split()) for last, words in _LAST_WORDS.items()}
# What names a place or a variable that holds the secret.
_POINTERS = frozenset({"env", "var", "variable", "file", "path"})

# Beginnings of secrets, under any name; behind them stand at least 16 letters, digits, _ and -.
_PREFIXES = (
    *("hf_", "api_org_"),  # Hugging Face
    *("gh[pousr]_", "github_pat_", "gl(?:pat|oas|dt|rt|rtr|cbt|ptt|ft|imt|agent|soat|ffct|wt)-", "dckr_pat_"),
    *("xox[a-z]-", r"xox[a-z]\.xox[a-z]-", "xapp-"),  # Slack
    *("AIza", r"ya29\.", "GOCSPX-"),  # Google
    *("nvapi-", r"wandb_v\d_", "gsk_", r"tgp_v\d_", "lsv2_[a-z]{2}_", r"hvs\.", "ATATT3", "lin_api_", r"do[opr]_v\d_"),
)
# Words begin like these too, so there must be a digit.
_LIKELY = (
    *("sk-", "[sr]k_live_", "[sr]k_test_"),  # OpenAI, Anthropic, OpenRouter, DeepSeek; Stripe
    *("xai-", "pplx-", "r8_", "fw_", "csk-", "dapi", "e2b_", "tvly-", "npm_", "pypi-", "ntn_", "LTAI", r"SG\."),
)
_TAIL = r"[A-Za-z0-9_\-]{16,}"
_FORMS = re.compile(
    rf"(?<![A-Za-z0-9])(?:(?:{'|'.join(_PREFIXES)}){_TAIL}"
    rf"|(?:{'|'.join(_LIKELY)})(?=[A-Za-z_\-]{{0,40}}\d){_TAIL}"
    r"|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])"  # AWS
    r"|eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*)"  # JSON Web Tokens
)
_RUN = re.compile(r"[A-Za-z0-9_.\-]{19,}")  # where such forms can be
_WITH_HEAD = re.compile(
    r"(Bearer )(?=[^\s\d]{0,100}\d)[A-Za-z0-9._~+/=\-]{8,}|(Basic )(?=[^\s\d=]{0,100}[\d=])[A-Za-z0-9+/]{8,}=*"
    r"|(hooks\.slack\.com/services/)[\w/]+|(://)[^\s/?#]+(?=@)"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[^-]*(?:-----END [A-Z ]{0,30}PRIVATE KEY-----)?"
)
# A name and what stands between it and its value: `--name=value` and `--name value` of a command, the same in a list
# that is written as text, `?name=value` of a URL; and `name: value` or `name=value` of YAML, Python or a command line.
_OPTION = re.compile(r"(?<!\S)(?P<name>--?[\w.\-]{1,64})(?P<sign>=| {1,4}(?!-))")
_LISTED = re.compile(r"""(?<![\w\-])(?P<name>--?[\w.\-]{1,64})(?P<sign>["'], ?["'])""")
_QUERY = re.compile(r"[?&;#](?P<name>[\w.\-]{1,64})(?P<sign>=)")
_ASSIGNED = re.compile(r"""(?<![\w.\-])(?P<name>[\w.\-]{1,128})(?P<sign>["']?\s{0,4}[=:]\s{0,4})""")
_ARGUMENT = re.compile(r""""[^"]*"|'[^']*'|[^\s&#"'<>]+""")
_VALUE = re.compile(
    r""""[^"]*"|'[^']*'|\$\{[^{}]*\}|\{[^{}]*\}|\[[^\[\]]*\]|(?:(?:Bearer|Basic)\s+)?[^\s,"'{}\[\]]*[^\s,"'{}\[\]:]""",
    re.IGNORECASE,
)
# A reference to the environment says where the secret is, and is none.
_REFERENCE = re.compile(r"""["']?(?:(?:Bearer|Basic|Token)\s+)?\$\{oc\.env:[^{},]*\}["']?""", re.IGNORECASE)
# Values that configs have taken from the environment, with their references. Shorter ones may be any word.
_OF_ENVIRONMENT: dict[str, str] = {}
_LEAST_CHARACTERS = 8


def redact(value: Any) -> Any:
    """A deep copy of `value` as plain dicts and lists, with secrets replaced by `***`.

    A value is a secret if its key or option says so (password, api_key, hfToken, --token ...), if it has the form of a
    known access key, or if it is the login part of a URL.
    """
    if isinstance(value, Mapping):
        return {key: REDACTED if _is_secret(str(key), item) else redact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        before = (None, *value)
        return [_redact_item(item, option) for item, option in zip(value, before, strict=False)]
    if isinstance(value, str):
        text = _RUN.sub(lambda run: _FORMS.sub(REDACTED, run[0]), value)
        text = _WITH_HEAD.sub(lambda match: (match[match.lastindex] if match.lastindex else "") + REDACTED, text)
        return _hide(_hide(text, _QUERY, _ARGUMENT), _OPTION, _ARGUMENT)
    return value


def redact_text(text: str) -> str:
    """A text with secrets replaced: values after a secret's name and `=` or `:`, and those that `redact` recognizes.

    Values that a config took from the environment are replaced by their references too.
    """
    text = _hide(without_environment(text), _LISTED, _ARGUMENT)
    return str(redact(_hide(text, _ASSIGNED, _VALUE)))


def without_environment(text: str) -> str:
    """A text, which may be code, with the values that a config took from the environment replaced."""
    for value, reference in _OF_ENVIRONMENT.items():
        text = text.replace(value, reference)
    return text


def lacks_secret(name: str, saved: Any) -> bool:
    """Tell whether a value that was saved under a name lacks a secret; other `***`, as in a prompt, are its own."""
    text = json.dumps({name: saved}, default=str)
    whole = json.loads(text.replace(REDACTED, _STAND_IN))
    return REDACTED in text and (f'"{REDACTED}"' in text or redact(whole) != whole)


def hide_in_texts(value: str, reference: str) -> None:
    """Replace a value that came from the environment in all texts from now on; files and folders stay readable."""
    if len(value) >= _LEAST_CHARACTERS and not os.path.exists(value):
        _OF_ENVIRONMENT[value] = reference


@lru_cache(4096)
def names_a_secret(name: str) -> bool:
    """Return whether what is given to a name (`hf_token`, `clientSecret`, `a.b.api-key`) is a secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+", "_", name).lower().split("_")
    words = [word for word in words if word]
    if not words or words[-1] in _POINTERS:
        return False
    if any(map(_SECRET_WORD.search, words)) or _SECRET_PAIR.search("_".join(words)):
        return True
    return words[-1] in _ORDINARY and words[-2:-1] not in [[word] for word in _ORDINARY[words[-1]]]


def _hide(text: str, named: re.Pattern[str], values: re.Pattern[str]) -> str:
    """A text without the values behind the names of secrets; `the token: that ...` and `key=value` are prose."""
    kept, end = [], 0
    for match in named.finditer(text):
        name, sign = match.group("name", "sign")
        of_path = sign == ": " and text[: match.start()].endswith("/")  # FOLDER/some_key: what is wrong with it
        ordinary = name.lower() in _ORDINARY and sign.strip() == ":"
        prose = named is _ASSIGNED and (name.lower() == "key" or ordinary or of_path)
        if match.start() < end or prose or not names_a_secret(name):
            continue
        value = values.match(text, match.end())
        if value is not None and _is_secret(name, value[0]):
            kept += [text[end : match.end()], REDACTED]
            end = value.end()
    return "".join([*kept, text[end:]])


def _redact_item(item: Any, before: Any) -> Any:
    """An item of a list, which may be the arguments of a program: OPTION, VALUE, or NAME=VALUE, or `Header: VALUE`."""
    if not isinstance(item, str):
        return redact(item)
    is_option = isinstance(before, str) and before.startswith("-") and "=" not in before
    if is_option and not item.startswith("-") and _is_secret(before, item):
        return REDACTED
    match = _ASSIGNED.match(item)
    if match is not None and _is_secret(match["name"], item[match.end() :]):
        return match[0] + REDACTED
    return redact(item)


def _is_secret(key: str, value: Any) -> bool:
    # An unset secret stays visible as unset, and a switch as what it is; a section named "credentials" is hidden whole.
    if value is None or value == "" or isinstance(value, bool):
        return False
    return not _REFERENCE.fullmatch(str(value)) and names_a_secret(key)
