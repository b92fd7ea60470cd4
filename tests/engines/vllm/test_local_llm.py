"""What runs vLLM's engine on CPU and records experts, on an engine of a token a step; real ones: test_engine.py."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from grpo_dist.engines.base import EngineLoad
from grpo_dist.engines.vllm import engine as vllm_engine
from grpo_dist.engines.vllm import local_llm, routed_experts
from grpo_dist.engines.vllm.engine import VLLMEngine, response_routes
from grpo_dist.engines.vllm.local_llm import LocalLLM
from grpo_dist.engines.vllm.routed_experts import record_steps
from grpo_dist.errors import EngineError
from tests.messages import refuses

FOR_EVER = 10**9


class Engine:
    """Has what LocalLLM uses of vLLM's LLMEngine and its scheduler: requests by id, and the tokens they still want."""

    def __init__(self) -> None:
        self.vllm_config, self.breaks, self.is_shut = "config", False, False
        self.running: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        core = SimpleNamespace(scheduler=self)
        self.engine_core = SimpleNamespace(engine_core=core, shutdown=lambda: setattr(self, "is_shut", True))

    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def add_request(self, request_id: str, request: Any, params: int, lora_request: Any) -> None:
        if params < 0:
            raise ValueError("no such params")
        self.waiting[request_id] = params

    def abort_request(self, ids: list[str]) -> None:
        for each in ids:
            self.running.pop(each, None)
            self.waiting.pop(each, None)

    def step(self) -> list[Any]:
        if self.breaks:
            raise RuntimeError("out of luck")
        self.running |= self.waiting
        self.waiting = {}
        left = {name: tokens - 1 for name, tokens in self.running.items()}
        self.running = {name: tokens for name, tokens in left.items() if tokens}
        return [SimpleNamespace(request_id=name, finished=tokens == 0) for name, tokens in left.items()]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    engine = Engine()
    monkeypatch.setattr(local_llm, "LLMEngine", SimpleNamespace(from_engine_args=lambda arguments: engine))
    yield engine
    assert engine.is_shut


async def final(llm: LocalLLM, name: str, tokens: int) -> list[Any]:
    return [output async for output in llm.generate({}, tokens, name)]


async def asked(engine: Engine, llm: LocalLLM, *names: str, tokens: int = FOR_EVER) -> list[asyncio.Future[Any]]:
    """Requests that run."""
    requests = [asyncio.ensure_future(final(llm, name, tokens)) for name in names]
    while len(engine.running) < len(names):
        await asyncio.sleep(0)
    return requests


async def test_final_outputs_reach_those_who_asked(engine: Engine) -> None:
    llm = LocalLLM(None)
    found = await asyncio.gather(*(final(llm, name, tokens) for name, tokens in (("a", 5), ("b", 1))))
    assert [[output.request_id for output in each] for each in found] == [["a"], ["b"]]
    assert llm.load == EngineLoad(0, 0)
    with refuses(ValueError, "params"):
        await final(llm, "c", -1)
    assert not llm.errored
    llm.shutdown()


async def test_an_aborted_or_cancelled_request_leaves_the_engine(engine: Engine) -> None:
    llm = LocalLLM(None)
    aborted, cancelled = await asked(engine, llm, "a", "b")
    await llm.abort("a")
    assert await aborted == []
    cancelled.cancel()
    await asyncio.wait([cancelled])
    await llm.abort("not there")
    assert not engine.running
    llm.shutdown()


async def test_a_step_that_fails_ends_all_requests(engine: Engine) -> None:
    llm = LocalLLM(None)
    (request,) = await asked(engine, llm, "a")
    engine.breaks = True
    with refuses(RuntimeError, "luck"):
        await request
    assert llm.errored
    llm._thread.join()  # and takes no order any more
    with refuses(RuntimeError, "failed before", "luck"):
        await final(llm, "b", 1)
    llm.shutdown()


def test_an_engine_that_does_not_start_says_why(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(arguments: Any) -> None:
        engine.is_shut = True
        raise ValueError("max_model_len")

    monkeypatch.setattr(local_llm.LLMEngine, "from_engine_args", refuse)
    with refuses(ValueError, "max_model_len"):
        LocalLLM(None)


async def test_what_is_aborted_after_the_engine_has_been_shut_down_is_no_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a run the driver aborts groups and shuts engines down, in any order. What still waits is told."""
    monkeypatch.setattr(vllm_engine, "DEATH_POLL_S", 0.01)
    rollout = VLLMEngine(None, SimpleNamespace(cleanup=lambda: None))  # type: ignore[arg-type]
    llm = rollout._llm = LocalLLM(None)
    request = asyncio.ensure_future(rollout._call(final(llm, "a", FOR_EVER), timeout_s=None))
    rollout._running = {"group": {"a", "b"}}
    while not engine.running:
        await asyncio.sleep(0)
    rollout.shutdown()
    await rollout.abort("group")
    with refuses(EngineError, "shut down"):
        await request


# --- the steps of the older runner, whose experts are recorded ------------------------------
@pytest.mark.parametrize(
    ("counts", "drafts", "sampled", "rows"),
    [
        (  # `a` begins, `b` had two drafts of which one was accepted, `c` is not through with its prompt
            {"c": 5, "b": 3, "a": 2},
            {"b": [8, 9]},
            [[5], [8, 6], []],
            [("rows", ["a", "b", "c"], [0, 2, 5, 10], [0, 7, 4]), ("tokens", [1, 2, 0], [0, 1, 0])],
        ),
        ({}, {}, [], []),
    ],
    ids=["tokens", "none"],
)
def test_rows_of_a_step_belong_to_requests_in_the_order_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, counts: Any, drafts: Any, sampled: Any, rows: Any
) -> None:
    calls: list[Any] = []

    def prepared(batch: Any) -> Any:
        starts = batch.query_start_loc_np.tolist(), batch.num_computed_tokens_np.tolist()
        calls.append(("rows", batch.req_ids, *starts))
        return connector

    connector, output = Mock(), SimpleNamespace(sampled_token_ids=sampled)
    connector.begin_step = lambda metadata: calls.append(("begin", metadata))
    connector.prepare_output = prepared
    connector.enqueue_cpu_copy = lambda *counts: calls.append(("tokens", *(each.tolist() for each in counts)))
    connector.process_output = lambda: "experts"
    monkeypatch.setattr(routed_experts, "get_aux_output_connector", lambda *_: connector)
    runner: Any = SimpleNamespace(
        model=None,
        vllm_config=None,
        kv_cache_config=None,
        input_batch=SimpleNamespace(req_ids=["a", "b", "c"], num_computed_tokens_cpu=np.array([0, 7, 4, 99])),
        execute_model=lambda scheduled: calls.append("runs"),
        sample_tokens=lambda grammar: output,
    )
    record_steps(runner)
    scheduled = {"num_scheduled_tokens": counts, "total_num_scheduled_tokens": sum(counts.values())}
    scheduled |= {"scheduled_spec_decode_tokens": drafts, "aux_output_connector_metadata": "step"}
    runner.execute_model(SimpleNamespace(**scheduled))
    assert getattr(runner.sample_tokens(None), "aux_output_connector_output", None) == ("experts" if rows else None)
    assert calls == [("begin", "step"), "runs", *rows]


def test_the_last_token_has_none() -> None:
    routes = response_routes(np.ones((2, 3, 4), np.uint8))
    assert routes is not None
    assert routes.dtype == np.uint8
    assert routes[:, 0, 0].tolist() == [1, 1, 255]
    assert (routes[2] == 255).all()
    assert response_routes(None) is None
