import pytest

from grpo_dist.redact import REDACTED, redact, redact_text


@pytest.mark.parametrize(
    "key",
    ["hf_token", "HF_TOKEN", "token", "WANDB_API_KEY", "api-key", "apikey", "password", "db_password",
     "aws_secret_access_key", "client_secret", "credentials", "private_key", "auth.token"],
)  # fmt: skip
def test_secret_keys(key):
    assert redact({"a": [{key: "value"}]}) == {"a": [{key: REDACTED}]}


@pytest.mark.parametrize(
    "key",
    ["ppo_max_token_len_per_gpu", "tokenizer", "token_level_rewards", "max_tokens", "eos_token",
     "loss_agg_mode", "passes", "prompt_key", "author", "skip_tokenizer_init"],
)  # fmt: skip
def test_ordinary_keys_stay(key):
    assert redact({key: "token-mean"}) == {key: "token-mean"}


def test_secret_values_and_url_logins():
    config = {
        "extra": "use hf_" + "a" * 30 + " here",
        "url": "https://user:pw@example.org/x?y=1",
        "plain": "https://example.org/a@b",
        "path": "s3://bucket/hf_models",
    }
    assert redact(config) == {
        "extra": "use *** here",
        "url": "https://***@example.org/x?y=1",
        "plain": "https://example.org/a@b",
        "path": "s3://bucket/hf_models",
    }


def test_copy_is_deep_and_unset_secrets_stay_unset():
    config = {"hf_token": None, "nested": {"n": (1, 2.5, True)}}
    copy = redact(config)
    assert copy == {"hf_token": None, "nested": {"n": [1, 2.5, True]}}
    copy["nested"]["n"].append(3)
    assert config["nested"]["n"] == (1, 2.5, True)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x.reward_kwargs={api_key:SECRET,n:1}: bad", "x.reward_kwargs={api_key:***,n:1}: bad"),
        ("x.api_key=SECRET: no such key", "x.api_key=***: no such key"),
        ("x='{a: 1, hf_token: \"SECRET two\"}'", "x='{a: 1, hf_token: ***}'"),
        ("got {'password': 'SECRET', 'a': 2}", "got {'password': ***, 'a': 2}"),
        ("headers: {Authorization: Bearer SECRET}", "headers: {Authorization: ***}"),
        ("data.tokenizer=a: eos_token=b, max_token_len=3", "data.tokenizer=a: eos_token=b, max_token_len=3"),
    ],
)
def test_a_text_about_a_config(text: str, shown: str) -> None:
    assert redact_text(text) == shown
