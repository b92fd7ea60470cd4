"""What is not shown to others: values that are secret, what only this machine may ask for, and control characters."""

import io
import json
import sys
from pathlib import Path

import pytest

from grpo_dist.cli.entry import main
from grpo_dist.cli.generate import side_by_side
from grpo_dist.config.keys import leaf_keys, section_keys
from grpo_dist.errors import DataError
from grpo_dist.hosts import is_this_machine
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT
from grpo_dist.redact import REDACTED, hide_in_texts, lacks_secret, names_a_secret, redact, redact_text
from grpo_dist.terminal import as_typed, json_line, printable, show
from grpo_dist.tracking.summary import Progress
from tests.programs import program

SECRET_KEYS = (
    "hf_token HF_TOKEN token WANDB_API_KEY api-key apikey password db_password aws_secret_access_key client_secret "
    "credentials private_key auth.token clientSecret authToken apiToken APIKey X-Api-Key key auth pwd dbPwd bearer "
    "openai_key basicAuth jwt sig X-Amz-Signature PGPASSWORD api_tokens accesskey set-cookie authorization HFToken "
    "accountKey"
).split()
ORDINARY_KEYS = (
    "ppo_max_token_len_per_gpu tokenizer token_level_rewards max_tokens eos_token loss_agg_mode passes prompt_key "
    "author skip_tokenizer_init max_token_len pad_token_id padToken image_token num_key_value_heads keys keyword "
    "tokens monkey api_key_env headers_env pattern signal design authors token_file spec_tokens "
    "dbo_decode_token_threshold max_num_batched_token"
).split()


@pytest.mark.parametrize("key", [*SECRET_KEYS, *ORDINARY_KEYS, ""])
def test_keys_that_are_secret_and_ordinary_ones(key):
    shown = REDACTED if key in SECRET_KEYS else "value"
    assert redact({"a": [{key: "value"}]}) == {"a": [{key: shown}]}


def test_secret_values_and_url_logins(tmp_path):
    plain = {"plain": "https://example.org/a@b", "path": "s3://bucket/hf_models"}
    config = {"extra": "use hf_" + "a" * 30 + " here", "url": "https://user:pw@example.org/x?y=1"} | plain
    assert redact(config) == {"extra": "use *** here", "url": "https://***@example.org/x?y=1"} | plain
    assert redact({"hf_token": None, "a": {"n": (1, 2.5, True)}}) == {"hf_token": None, "a": {"n": [1, 2.5, True]}}
    for value in ("a value of the environment", "short", str(tmp_path)):
        hide_in_texts(value, "${oc.env:X}")
    text = f"a value of the environment, short, {tmp_path}"
    assert redact_text(text) == f"${{oc.env:X}}, short, {tmp_path}"
    assert redact({"n": text}) == {"n": text}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x.reward_kwargs={api_key:SECRET,n:1}: bad", "x.reward_kwargs={api_key:***,n:1}: bad"),
        ("x.api_key=SECRET: no such key", "x.api_key=***: no such key"),
        ("x='{a: 1, hf_token: \"SECRET two\"}'", "x='{a: 1, hf_token: ***}'"),
        ("got {'password': 'SECRET', 'a': 2}", "got {'password': ***, 'a': 2}"),
        ("headers: {Authorization: Bearer SECRET}", "headers: {Authorization: ***}"),
        ("x=/a/judge_key/api_key=SECRET, b/my_key:SECRET", "x=/a/judge_key/api_key=***, b/my_key:***"),
        ("{'org/api_key': 'SECRET'}", "{'org/api_key': ***}"),
        ("x.credentials={user:me,pin:1}: bad; y.authToken=[a,b]", "x.credentials=***: bad; y.authToken=***"),
        ("x.api_key=${oc.env:K} token=abc", "x.api_key=${oc.env:K} token=***"),
    ],
)
def test_a_text_about_a_config(text: str, shown: str) -> None:
    assert redact_text(text) == shown


@pytest.mark.parametrize(
    ("name", "value", "lacking"),
    [
        ("a.key", "answer", True),
        ("a.key", 5, True),
        ("a.text", "hf_abcdefghijklmnop1234", True),
        ("a.headers", {"Accept": "json", "Authorization": "Bearer abc"}, True),
        ("a.functions", [{"path": "f", "reward_kwargs": {"pass_token": "x"}}], True),
        ("a.command", ["serve", "--token", "abc"], True),
        ("a.prompt", "call it with --token abc", True),
        ("a.url", "http://user:word@judge/score?n=1", True),
        ("a.url", "http://judge/score?sig=abc", True),
        ("a.key", None, False),
        ("a.prompt", "*** be brief ***", False),
        ("a.separators", ["\n***\n", "---"], False),
    ],
)
def test_what_a_saved_value_lacks(name: str, value: object, lacking: bool) -> None:
    assert lacks_secret(name, redact({name: value})[name]) == lacking
    assert not lacks_secret(name, value)


def test_no_key_of_the_config_is_a_secret() -> None:
    schemas = [command.schema for command in (GRPO, SFT, REWARD_MODEL)]
    keys = [key for schema in schemas for key in (*leaf_keys(schema), *section_keys(schema))]
    assert "data.prompt_key" in keys
    assert [key for key in keys if names_a_secret(key)] == []
    assert redact_text("\n".join(f"{key}=some-value" for key in keys)).count("some-value") == len(keys)


A = "A1b2C3d4E5f6G7h8I9j0"


@pytest.mark.parametrize(
    "secret",
    [f"hf_{A}", f"sk-{A}", f"sk-proj-{A}_x", f"sk-ant-api03-{A}-x", f"sk-or-v1-{A}", f"ghp_{A}", f"gho_{A}", f"ghs_{A}",
     f"github_pat_11ABC_{A}", f"glpat-{A}", f"gldt-{A}", f"xoxb-123456789012-{A}", f"xoxp-1-{A}", f"xapp-1-A1-{A}",
     f"AIza{A}_ABCDEFGHIJKLMN", f"ya29.{A}", f"nvapi-{A}-{A}", "AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE",
     f"eyJhbGciOiJI.eyJzdWIiOiIx.{A}", f"wandb_v1_{A}", f"gsk_{A}", f"xai-{A}", f"r8_{A}", f"npm_{A}", f"tgp_v1_{A}",
     f"dapi{A}", f"lsv2_pt_{A}_x", f"hvs.{A}",
     f"-----BEGIN RSA PRIVATE KEY-----\n{A}\n{A}==\n-----END RSA PRIVATE KEY-----"],
)  # fmt: skip
def test_forms_of_vendors(secret: str) -> None:
    for form in ("{}", "use {} here", "'{}'", "x={}", "https://host/{}/x", "[{}]"):
        for shown in (redact(form.format(secret)), redact([form.format(secret)])[0], redact_text(form.format(secret))):
            assert shown == form.format(REDACTED)


@pytest.mark.parametrize(
    "text",
    ["sk-learn-based-approaches", "hf_models", "global-step-checkpoint-12", "fw_attention_backend_name",
     "ASIA_pacific_1", "ghp_short", "eyJ.a.b", "Basic mathematics and Bearer understanding", "https://medium.com/@user/x",
     "a@b.c", "s3://bucket/key=1", "What? key value", "f(x, key=len)", "a -- key b", "https://host/x?page=2&n=3#top",
     "--max-tokens 5 --tokenizer a --eos-token b", "--verbose", "x --token",
     "model.path=/a/judge_key: model.index.json is missing", "data.tokenizer=a: eos_token=b, max_token_len=3",
     "write key=value; the token: that ends it; ignored the key: it is not known"],
)  # fmt: skip
def test_ordinary_texts_stay(text: str) -> None:
    assert redact(text) == redact_text(text) == text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://judge/score?api_key=ZQX&n=1", "http://judge/score?api_key=***&n=1"),
        ("http://judge/score?n=1&sig=ZQX#top", "http://judge/score?n=1&sig=***#top"),
        ("http://judge/#access_token=ZQX", "http://judge/#access_token=***"),
        ("http://judge?key=ZQX", "http://judge?key=***"),
        ("https://user:p@ZQX@host/x?y=1", "https://***@host/x?y=1"),
        ("postgres://user:ZQX:a@b@host:5432/db a@b", "postgres://***@host:5432/db a@b"),
        ("judge --api-key=ZQX -v", "judge --api-key=*** -v"),
        ("judge --api-key ZQX -v", "judge --api-key *** -v"),
        ("judge --password 'ZQX ZQX' -v", "judge --password *** -v"),
        ("Bearer ZQX0ZQX0", "Bearer ***"),
        (["judge", "--api-key=ZQX"], ["judge", "--api-key=***"]),
        (["judge", "--api-key", "ZQX", "--n", "3"], ["judge", "--api-key", "***", "--n", "3"]),
        (("judge", "-token", "ZQX"), ["judge", "-token", "***"]),
        (["--token", "--n", "3"], ["--token", "--n", "3"]),
        (["env", "API_KEY=ZQX", "judge"], ["env", "API_KEY=***", "judge"]),
        (["-H", "Authorization: Bearer ZQX"], ["-H", "Authorization: ***"]),
        ([{"auth": ["ZQX"]}, "pw=ZQX"], [{"auth": "***"}, "pw=***"]),
        ({"password": 12345, "use_auth": True, "kl": 1}, {"password": "***", "use_auth": True, "kl": 1}),
        ({"api_key": "${oc.env:K}", "a": {"auth": "Bearer ${oc.env:K}"}},
         {"api_key": "${oc.env:K}", "a": {"auth": "Bearer ${oc.env:K}"}}),
        ({"api_key": "${oc.env:K,ZQX}", "token": "ZQX${oc.env:K}"}, {"api_key": "***", "token": "***"}),
    ],
)  # fmt: skip
def test_secrets_in_urls_and_arguments(value: object, shown: object) -> None:
    assert redact(value) == shown
    assert "ZQX" not in redact_text(str(value))


OURS = ["", "localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000", "127.8.9.1", "[::1]:8000"]
OTHERS = "evil.example evil.example:8000 localhost.evil.example 127.0.0.1.evil.example 10.0.0.1 [::2] [::1 0.0.0.0"


@pytest.mark.parametrize("host", [*OURS, *OTHERS.split(), "evil.example@127.0.0.2.x", "2130706433", " "])
def test_names_of_this_machine_alone(host: str) -> None:
    assert is_this_machine(host) == (host in OURS)


# --- what reaches a terminal ------------------------------------------------------------------------------------------
EVIL = "\x1b[2J \x1b]0;title\x07 \x9b31m \x08\x08 \r \x7f \u2028 \u202e \u2066 \x00 \ud800".split(" ")


@pytest.mark.parametrize("text", EVIL)
def test_control_characters_are_replaced(text: str) -> None:
    for shown in (printable(f"a{text}b"), *side_by_side([text], 80), *side_by_side([text, "b"], 80)):
        assert not set(shown) & set("\x1b\x9b\x08\r\x7f\x07\u2028\u202e\u2066\x00\ud800")
    assert printable(f"a{text}b")[:: len(printable(f"a{text}b")) - 1] == "ab"
    assert json.loads(json_line({"a": text})) == {"a": text}
    assert printable(json_line({"a": text})) == json_line({"a": text})
    assert json_line({"a": text}).count("\n") == 1


def test_text_of_people_stays_where_a_stream_has_its_letters() -> None:
    text = "tab\tand\nline, 中文\u3000空格, é, 👩\u200d🔬, \u00a0, שלום, ½"
    assert printable(text) == text
    assert json.loads(json_line(text)) == text
    assert "中文\u3000" in json_line(text)
    streams = [io.TextIOWrapper(io.BytesIO(), name) for name in ("latin-1", "ascii")]
    for stream in streams:
        show("½ é\x1b\n", stream)
    assert [stream.buffer.getvalue() for stream in streams] == [b"\xbd \xe9?\n", b"? ??\n"]  # type: ignore[attr-defined]


def test_messages_of_runs_and_errors_that_quote_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    Progress(1, 0, stream).message("the row says \x1b[2J")

    def refuse(arguments: list[str]) -> int:
        raise DataError("rows.jsonl, row 1: '\x1b[2J'")

    monkeypatch.setattr("grpo_dist.cli.help.main", refuse)
    assert main(["help"]) == 2
    assert "\x1b" not in stream.getvalue() + capsys.readouterr().err


def test_a_program_is_called_by_its_name_or_else_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = program(tmp_path / "of us" / "bin" / "grpo-dist", "")
    monkeypatch.setattr(sys, "executable", str(own.with_name("python")))
    monkeypatch.setenv("PATH", "")
    assert as_typed("grpo-dist") == f"'{own}'"
    monkeypatch.chdir(tmp_path)
    assert as_typed("grpo-dist") == "'of us/bin/grpo-dist'"
    assert as_typed("tensorboard") == "tensorboard", "this environment has none"
    monkeypatch.setenv("PATH", str(own.parent))
    assert as_typed("grpo-dist") == "grpo-dist"
