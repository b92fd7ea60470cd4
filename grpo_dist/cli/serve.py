"""`grpo-dist serve RUN_OR_MODEL`: an OpenAI-compatible server of a trained model, asked as its run asked it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import json
import os
import socket
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from grpo_dist.cli.arguments import MODEL_ARGUMENTS, add_shared, command_parser
from grpo_dist.cli.trained import TrainedModel, engine_for, find_trained
from grpo_dist.engines.rendezvous import LOOPBACK
from grpo_dist.engines.vllm.front import MODEL
from grpo_dist.engines.vllm.server import KEY_VARIABLE, listen, serving
from grpo_dist.errors import ConfigError, EngineError
from grpo_dist.terminal import show

PORT = 8000


def main(arguments: Sequence[str]) -> NoReturn:
    """Serve until SIGINT or SIGTERM, which ends the process."""
    own, more = split(arguments)
    parser = command_parser(
        "serve",
        "Serve a trained model over HTTP, by the protocols of OpenAI and Anthropic. Where a request says "
        "nothing it gets the run's system prompt, template arguments and sampling.",
        epilog="behind -- stand options of `vllm serve`: -- --enable-auto-tool-choice --tool-call-parser hermes",
    )
    add_shared(parser, *MODEL_ARGUMENTS)
    parser.add_argument("--host", default=LOOPBACK, help="address to listen at (%(default)s: this machine alone)")
    parser.add_argument("--port", type=int, default=PORT, help="%(default)s; 0: a free one")
    key = f"the token that requests must have; better in the environment, as {KEY_VARIABLE}"
    parser.add_argument("--api-key", metavar="TOKEN", help=key)
    add_shared(parser, "--max-model-len")
    name = "name of the model in requests (%(default)s, as at the endpoint in training)"
    parser.add_argument("--served-model-name", default=MODEL, help=name)
    options = parser.parse_intermixed_args(own)
    token = options.api_key or os.environ.get(KEY_VARIABLE, "")
    check_host(options.host, token)
    listening = listen(options.host, options.port)
    model = find_trained(options.model, options.overrides, options.step, trust=options.trust)
    warnings.simplefilter("ignore")  # what vLLM imports warns of what it imports
    asyncio.run(_serve(model, options, listening, token, more))
    os._exit(0)  # at an orderly end, modules that vLLM has imported list what they leak; `show` has flushed


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before and behind the first `--`."""
    own = list(arguments)
    at = own.index("--") if "--" in own else len(own)
    return own[:at], own[at + 1 :]


def check_host(host: str, token: str) -> None:
    """Check that other machines cannot ask without a token."""
    is_own = host == "localhost"
    with contextlib.suppress(ValueError):  # a name
        is_own |= ipaddress.ip_address(host).is_loopback
    if not (token or is_own):
        raise ConfigError(
            f"--host {host}: other machines can reach the server there, and it would answer everybody; set "
            f"{KEY_VARIABLE} in the environment, or --api-key, to a token, or leave --host at {LOOPBACK}"
        )


async def _serve(
    model: TrainedModel, options: argparse.Namespace, listening: socket.socket, token: str, more: Sequence[str]
) -> None:
    settings = engine_for(model, options.max_model_len)
    name = options.served_model_name
    show(f"starting a server on {settings.device} with {model.folder}\n", sys.stderr)
    try:
        async with serving(settings, model.usage, listening, name=name, token=token, more=more) as server:
            show(ready(server.url, model.name, name, with_token=bool(token)))
            await asyncio.wait({server.ended})
            raise EngineError("vLLM's engine has failed, and the server has ended; the reason is above")
    except asyncio.CancelledError:  # a signal
        show("the server has ended\n", sys.stderr)


def ready(url: str, model: str, name: str, *, with_token: bool) -> str:
    """Return the lines that say where the server is, and how to ask it."""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    header = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if with_token else ""
    where = f" ({KEY_VARIABLE}: the token)" if with_token else ""
    return (
        f"ready: {model} as {name} at {url}/v1\n"
        f"ask it{where}:\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{body}'\n"
    )
