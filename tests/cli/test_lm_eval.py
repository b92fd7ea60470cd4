"""What lm-eval is told, and when it is not asked at all. It is no part of the tests' environment."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_dist.cli.lm_eval import check_installed, figures_of, model_arguments, run_lm_eval
from grpo_dist.cli.trained import engine_for, find_trained
from grpo_dist.errors import ConfigError
from tests.messages import refuses

TINY = "builtin:tiny-qwen3"


def interpreter(folder: Path, body: str) -> str:
    """A program in the place of an interpreter."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return str(file)


def test_without_lm_eval_it_says_how_to_install_it(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "echo \"ModuleNotFoundError: No module named 'lm_eval'\" >&2; exit 1")
    with refuses(ConfigError, f"--lm-eval-python {python}", "lm_eval", "pip install 'lm-eval[api]==0.4.13'"):
        run_lm_eval(find_trained(TINY), ["arc_easy"], python=python)
    with refuses(ConfigError, "pip install 'lm-eval[api]==0.4.13' transformers"):
        run_lm_eval(find_trained(TINY), ["arc_easy"], python=python, likelihood=True)
    with refuses(ConfigError, f"--lm-eval-python {tmp_path / 'gone'}"):
        check_installed(str(tmp_path / "gone"), likelihood=False)
    check_installed(interpreter(tmp_path, "exit 0"), likelihood=True)


@pytest.mark.parametrize("option", ["--model", "--model_args=a=1", "-o", "--output_path"])
def test_what_is_given_already_is_refused(option: str) -> None:
    with refuses(ConfigError, option.partition("=")[0]):
        run_lm_eval(find_trained(TINY), ["arc_easy"], more=[option], python=sys.executable)


def test_conversations_and_likelihoods_have_routes_of_their_own() -> None:
    settings = replace(engine_for(find_trained(TINY)), max_model_len=300, model_path="/models/mine")
    model, name, flag, values, template = model_arguments("http://127.0.0.1:1", settings, likelihood=False)
    assert (model, name, flag, template) == (
        "--model",
        "local-chat-completions",
        "--model_args",
        "--apply_chat_template",
    )
    assert values.split(",")[:2] == ["model=policy", "base_url=http://127.0.0.1:1/v1/chat/completions"]
    assert "max_length=300" in values.split(",")
    _, name, _, values = model_arguments("http://127.0.0.1:1", settings, likelihood=True)
    assert name == "local-completions"
    assert {"base_url=http://127.0.0.1:1/v1/completions", "tokenizer=/models/mine"} <= set(values.split(","))


def test_metrics_and_their_intervals() -> None:
    sums = {"alias": "sums", "exact_match,strict": 0.5, "exact_match_stderr,strict": 0.1, "f1,none": 0.25}
    other = {"acc,none": 1.0, "acc_stderr,none": "N/A", "sample_len": 5}
    assert figures_of({"sums": sums, "other": other}) == {
        "sums exact_match (strict)": [0.5, pytest.approx(0.3040036), pytest.approx(0.6959964)],
        "sums f1": 0.25,
        "other acc": 1.0,
    }
