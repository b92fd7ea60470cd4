"""A gateway over a small app that samples with the body as the prompt, and clients of it."""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from grpo_dist.agents.gateway import Gateway, Session, socket_at
from grpo_dist.agents.recording import Recording
from grpo_dist.engines.base import Response
from grpo_dist.engines.rendezvous import LOOPBACK
from grpo_dist.engines.settings import SamplingSettings
from tests.agents.fakes import Characters

CHAT = "/v1/chat/completions"


class App:
    """Stands for vLLM's: samples with the body as the prompt and answers with the tokens."""

    def __init__(self, sample: Any) -> None:
        self.sample, self.paths = sample, list[str]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message.get("more_body", False)
        try:
            response = await self.sample(list(body), 5, ())
            status, answer = 200, bytes(response.token_ids)
        except ValueError as error:
            status, answer = 400, str(error).encode()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": answer})


async def upper(prompt: list[int], sampling: SamplingSettings) -> Response | None:
    ids = list(bytes(prompt).upper())[: sampling.max_tokens]
    return Response(ids, [-0.5] * len(ids), False, [3] * len(ids))


@asynccontextmanager
async def serving(
    app: Callable[[Any], Any] = App,
    host: str = LOOPBACK,
    advertised_host: str | None = None,
    node_ip: str = LOOPBACK,
) -> AsyncIterator[Gateway]:
    async def make_app(sample: Any) -> Any:
        return await made if inspect.isawaitable(made := app(sample)) else made

    gateway = Gateway(make_app, socket_at(host, node_ip), advertised_host)
    try:
        yield gateway
    finally:
        await gateway.stop()


async def opened(gateway: Gateway, sample: Any = upper, **options: Any) -> Session:
    sampling = SamplingSettings(1, 1.0, 1.0, -1, 50, 7)
    session = Session(Recording(sampling, Characters(), 90, 400, **options), sample)
    await gateway.open(session)
    return session


async def post(gateway: Gateway, path: str, token: str = "", body: Any = b"hi", **headers: str) -> httpx.Response:
    if token:
        headers["authorization"] = f"Bearer {token}"
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(gateway.url + path, content=body, headers=headers)
