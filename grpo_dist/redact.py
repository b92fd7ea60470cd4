"""Removes secrets from configs and texts before they are printed, logged or sent to a tracking service.

A secret is known by the name it is given to (`api_key`, `clientSecret`, `--token`, `?sig=`), by its own form (GitHub's,
Slack's, ... tokens), or because the config took it from the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

REDACTED = "***"

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
    "token": "additional assistant audio bad boi bos by call class cls decoder each end eoi eom eos eot fim first good "
    "image label last mask max mean middle min new newline next num pad per pooling prefix prev sep separator special "
    "split start step stop suffix sum system think thinking tool unk user video",
    **dict.fromkeys(("auth", "jwt", "pat", "pw", "sig", "signature"), ""),
}
_ORDINARY = {last: frozenset(words.split()) for last, words in _LAST_WORDS.items()}
# What names a place or a variable that holds the secret.
_POINTERS = frozenset({"env", "var", "variable", "file", "path"})

# Beginnings of secrets, under any name; behind them stand at least 16 letters, digits, _ and -.
_PREFIXES = (
    *("hf_", "api_org_"),  # Hugging Face
    *("gh[pousr]_", "github_pat_", "gl(?:pat|oas|dt|rt|rtr|cbt|ptt|ft|imt|agent|soat|ffct|wt)-", "dckr_pat_"),
    *("xox[a-z]-", r"xox[a-z]\.xox[a-z]-", "xapp-", r"hooks\.slack\.com/services/T[A-Z0-9]+/B[A-Z0-9]+/"),
    *("AIza", r"ya29\.", "GOCSPX-"),  # Google
    *(
        "nvapi-",
        r"wandb_v\d+_",
        "gsk_",
        r"tgp_v\d+_",
        "lsv2_[a-z]{2}_",
        r"hvs\.",
        "ATATT3",
        "lin_api_",
        r"do[opr]_v\d_",
    ),
)
# Of these words have some too, so there must be a digit.
_LIKELY = (
    *("sk-", "[sr]k_live_", "[sr]k_test_"),  # OpenAI, Anthropic, OpenRouter, DeepSeek; Stripe
    *("xai-", "pplx-", "r8_", "fw_", "csk-", "dapi", "e2b_", "tvly-", "npm_", "pypi-", "ntn_", "LTAI", r"SG\."),
)
_TAIL = r"[A-Za-z0-9_\-]{16,}"
_FORMS = re.compile(
    rf"(?<![A-Za-z0-9])(?:{'|'.join(_PREFIXES)}){_TAIL}"
    rf"|(?<![A-Za-z0-9])(?:{'|'.join(_LIKELY)})(?=[A-Za-z_\-]*\d){_TAIL}"
    r"|\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b"  # AWS
    r"|(?<![A-Za-z0-9])eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*"  # JSON Web Tokens
    r"|(?<=Bearer )(?=\S*\d)[A-Za-z0-9._~+/=\-]{8,}|(?<=Basic )(?=\S*[\d=])[A-Za-z0-9+/]{8,}=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_URL_LOGIN = re.compile(r"(?<=://)[^\s/?#]+(?=@)")
_VALUE = r"""(?P<value>"[^"]*"|'[^']*'|[^\s&#"'<>]+)"""
_QUERY = re.compile(rf"(?<=[?&;#])(?P<name>[\w.\-]+)(?P<sign>=){_VALUE}")
_OPTION = re.compile(rf"(?<!\S)(?P<name>--?[\w.\-]+)(?P<sign>=| +(?!-)){_VALUE}")
# The same in a list of arguments that is a text.
_LISTED = re.compile(r"""(?P<name>--?[\w.\-]+)(?P<sign>["'],\s*["'])(?P<value>[^"']+)""")
# A name, = or :, and a value in quotes or brackets or up to the next delimiter: a command line, YAML, Python.
_ASSIGNED = re.compile(
    r"""(?<![\w.\-])(?P<name>[\w.\-]+)(?P<sign>["']?\s*[=:]\s*)"""
    r"""(?P<value>"[^"]*"|'[^']*'|\$\{[^{}]*\}|\{[^{}]*\}|\[[^\[\]]*\]|"""
    r"""(?:(?:Bearer|Basic)\s+)?[^\s,"'{}\[\]]*[^\s,"'{}\[\]:])""",
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
        value = _URL_LOGIN.sub(REDACTED, _FORMS.sub(REDACTED, value))
        return _OPTION.sub(_given, _QUERY.sub(_given, value))
    return value


def redact_text(text: str) -> str:
    """A text with secrets replaced: values after a secret's name and `=` or `:`, and those that `redact` recognizes.

    Values that a config took from the environment are replaced by their references too.
    """
    text = _LISTED.sub(_given, without_environment(text))
    return str(redact(_ASSIGNED.sub(_assigned, text)))


def without_environment(text: str) -> str:
    """A text, which may be code, with the values that a config took from the environment replaced."""
    for value, reference in _OF_ENVIRONMENT.items():
        text = text.replace(value, reference)
    return text


def hide_in_texts(value: str, reference: str) -> None:
    """Replace a value that came from the environment in all texts from now on; files and folders stay readable."""
    if len(value) >= _LEAST_CHARACTERS and not os.path.exists(value):
        _OF_ENVIRONMENT[value] = reference


def names_a_secret(name: str) -> bool:
    """Whether what is given to a name (`hf_token`, `clientSecret`, `a.b.api-key`) is a secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+", "_", name).lower().split("_")
    words = [word for word in words if word]
    if not words or words[-1] in _POINTERS:
        return False
    if any(map(_SECRET_WORD.search, words)) or _SECRET_PAIR.search("_".join(words)):
        return True
    return words[-1] in _ORDINARY and words[-2:-1] not in [[word] for word in _ORDINARY[words[-1]]]


def _given(found: re.Match[str]) -> str:
    """What an option of a command or a URL, or another name, is given to."""
    name, sign, value = found.group("name", "sign", "value")
    return name + sign + (REDACTED if _is_secret(name, value) else value)


def _assigned(found: re.Match[str]) -> str:
    """The same in a text, where `the token: that ...` and `key=value` give nothing, and values have names in them."""
    name, sign, value = found.group("name", "sign", "value")
    prose = name.lower() == "key" or (name.lower() in _ORDINARY and sign.strip() == ":")
    hidden = REDACTED if _is_secret(name, value) and not prose else _ASSIGNED.sub(_assigned, value)
    return name + sign + hidden


def _redact_item(item: Any, before: Any) -> Any:
    """An item of a list, which may be the arguments of a program: OPTION, VALUE, or NAME=VALUE, or `Header: VALUE`."""
    if not isinstance(item, str):
        return redact(item)
    is_option = isinstance(before, str) and before.startswith("-") and "=" not in before
    if is_option and not item.startswith("-") and _is_secret(before, item):
        return REDACTED
    whole = _ASSIGNED.fullmatch(item)
    return _given(whole) if whole is not None and names_a_secret(whole["name"]) else redact(item)


def _is_secret(key: str, value: Any) -> bool:
    # An unset secret stays visible as unset, and a switch as what it is; a section named "credentials" is hidden whole.
    if value is None or value == "" or isinstance(value, bool):
        return False
    return not _REFERENCE.fullmatch(str(value)) and names_a_secret(key)
