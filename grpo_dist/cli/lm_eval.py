"""`grpo-dist eval RUN_OR_MODEL --lm-eval TASKS`: EleutherAI's lm-evaluation-harness, over HTTP, in any interpreter."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_dist.cli.trained import TrainedModel, engine_for
from grpo_dist.engines.rendezvous import LOOPBACK
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.openai_app import MODEL
from grpo_dist.engines.vllm.server import Server, listen, serving
from grpo_dist.errors import ConfigError, EngineError, GrpoDistError
from grpo_dist.terminal import show

PACKAGE = "'lm-eval[api]==0.4.13'"
Z = 1.959964  # standard errors on both sides of a 95 % confidence interval
CONCURRENT = 64  # requests at the same time; vLLM makes batches of them
REQUEST_S = 24 * 3600  # as long as it takes: on CPU a request may wait for many others
# Options of lm-eval that are given in another way here.
GIVEN = ("--model", "-M", "--model_args", "-a", "--tasks", "-t", "--output_path", "-o", "--apply_chat_template")


@dataclass(frozen=True)
class LmEval:
    """What lm-eval found: the metrics of each task, and the table that it prints."""

    results: dict[str, dict[str, Any]]
    table: str


def run_lm_eval(
    model: TrainedModel,
    tasks: Sequence[str],
    *,
    likelihood: bool = False,
    more: Sequence[str] = (),
    python: str = sys.executable,
    output: Path | None = None,
    max_model_len: int | None = None,
) -> LmEval:
    """Serve a model on loopback, and have lm-eval ask it. How it samples is the tasks'.

    Args:
        model: to serve.
        tasks: of lm-eval.
        likelihood: ask how likely texts are, as tasks of multiple choice need it: plain text, without the chat template
            and the run's system prompt. False: have it answer conversations, with both.
        more: options of `lm-eval run`, such as `--limit 10` or `--include_path FOLDER`.
        python: interpreter that has lm-eval.
        output: folder for the files that lm-eval writes; None: they are not kept.
        max_model_len: see `engine_for`.

    Raises:
        ConfigError: lm-eval is not installed there, or an option is wrong.
        EngineError: the server does not start, or has ended.
        GrpoDistError: lm-eval failed, and has said why.
        KeyboardInterrupt: SIGINT or SIGTERM.
    """
    for option in more:
        if option.partition("=")[0] in GIVEN:
            raise ConfigError(f"{option}: grpo-dist gives lm-eval this option itself; leave it out")
    check_installed(python, likelihood=likelihood)
    settings = engine_for(model, max_model_len)
    with tempfile.TemporaryDirectory(prefix="grpo_dist-") as temporary:
        folder = output or Path(temporary)
        before = set(folder.rglob("results_*.json"))
        command = [python, "-m", "lm_eval", "run", "--tasks", *tasks, "--output_path", str(folder), *more]
        try:
            table = asyncio.run(_evaluate(model, settings, command, likelihood=likelihood))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        [file] = set(folder.rglob("results_*.json")) - before
        return LmEval(json.loads(file.read_text())["results"], table)


def figures_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float] | float]:
    """The metrics of all tasks by name, with a 95 % confidence interval where there is a standard error."""
    found: dict[str, list[float] | float] = {}
    for task, metrics in results.items():
        for name, value in metrics.items():
            metric, _, form = name.partition(",")
            if isinstance(value, str) or metric == "sample_len" or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{form}")
            key = f"{task} {metric}" + ("" if form in ("", "none") else f" ({form})")
            half = Z * error if isinstance(error, int | float) else None
            found[key] = value if half is None else [value, value - half, value + half]
    return found


def check_installed(python: str, *, likelihood: bool) -> None:
    """Check that an interpreter has lm-eval and, to count the tokens of texts, transformers.

    Raises:
        ConfigError: it does not, or there is none.
    """
    modules, packages = ["lm_eval", "tenacity"], [PACKAGE]
    if likelihood:
        modules, packages = [*modules, "transformers"], [*packages, "transformers"]
    command = [python, "-c", f"import {', '.join(modules)}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(
            f"--lm-eval-python {python}: {error.strerror}; name an interpreter that has lm-eval"
        ) from None
    if found.returncode:
        reason, install = found.stderr.strip().rpartition("\n")[2], f"pip install {' '.join(packages)}"
        raise ConfigError(
            f"--lm-eval-python {python}: {reason}; install lm-eval there ({install}), or name one that has it"
        )


def model_arguments(url: str, settings: EngineSettings, *, likelihood: bool) -> list[str]:
    """lm-eval's options for a server."""
    route = "completions" if likelihood else "chat/completions"
    values = {
        "model": MODEL,
        "base_url": f"{url}/v1/{route}",
        "num_concurrent": CONCURRENT,
        "timeout": REQUEST_S,
        "max_length": settings.max_model_len,
    }
    if likelihood:
        values |= {"tokenizer": settings.model_path, "tokenizer_backend": "huggingface"}
    options = ["--model", f"local-{route.replace('/', '-')}", "--model_args"]
    options += [",".join(f"{name}={value}" for name, value in values.items())]
    return options if likelihood else [*options, "--apply_chat_template"]


async def _evaluate(model: TrainedModel, settings: EngineSettings, command: list[str], *, likelihood: bool) -> str:
    """What lm-eval prints."""
    token = secrets.token_urlsafe(24)
    usage = replace(model.usage, sampling={"temperature": 0.0})  # else top_p and others of the run would be the tasks'
    show(f"starting a server on {settings.device} with {model.folder}\n", sys.stderr)
    async with serving(settings, usage, listen(LOOPBACK, 0), name=MODEL, token=token) as server:
        options = model_arguments(server.url, settings, likelihood=likelihood)
        environment = {"LMEVAL_LOG_LEVEL": "WARNING"} | os.environ | {"OPENAI_API_KEY": token}
        child = await asyncio.create_subprocess_exec(
            *command, *options, env=environment, stdout=asyncio.subprocess.PIPE
        )
        try:
            return await _printed(child, server)
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()


async def _printed(child: asyncio.subprocess.Process, server: Server) -> str:
    talk = asyncio.create_task(child.communicate())
    await asyncio.wait({talk, server.ended}, return_when=asyncio.FIRST_COMPLETED)
    if server.ended.done():
        talk.cancel()
        raise EngineError("vLLM's engine has failed, and the server has ended; the reason is above")
    printed, _ = await talk
    if child.returncode:
        raise GrpoDistError(f"lm-eval ended with exit code {child.returncode}; the reason is above")
    return printed.decode()
