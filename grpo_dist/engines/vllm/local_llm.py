"""vLLM's engine in a thread of this process: what CPU engines run on, in place of vLLM's AsyncLLM.

AsyncLLM hands every token from a core process, or a thread in its place, to the asyncio loop; with a small model on CPU
that costs a quarter of the time. Here one thread schedules, runs the model and collects the tokens (vLLM's `LLMEngine`
without multiprocessing), and only finished groups reach the loop. A rollout worker starts sooner than with a core
process, and leaves no child behind, whatever kills it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.llm_engine import LLMEngine

from grpo_dist.engines.base import EngineLoad


class LocalLLM:
    """The part of AsyncLLM's interface that `VLLMEngine` uses, on one thread.

    Attributes:
        errored: whether the engine has failed; nothing is answered then.
        engine: vLLM's LLMEngine; but for its settings and its tokenizer used on the thread alone.
    """

    def __init__(self, arguments: Any) -> None:
        self.errored, self._failure = False, ""
        self.load = EngineLoad()
        self._orders: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._answers: dict[str, Future[Any]] = {}  # by request
        self._drained: list[Future[None]] = []
        started: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(arguments, started), name="vLLM", daemon=True)
        self._thread.start()
        self.engine = started.result()
        self.vllm_config = self.engine.vllm_config

    # --- requests ----------------------------------------------------------------------------------------------
    async def generate(
        self, request: Any, params: Any, request_id: str, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        """The request's final output; none if it was aborted."""
        answer: Future[Any] = Future()

        def add() -> None:
            self.engine.add_request(request_id, request, params, lora_request=lora_request)
            self._answers[request_id] = answer

        try:
            await self._do(add)
            output = await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self._send(lambda: self._abort(request_id))
            raise
        if output is not None:
            yield output

    async def abort(self, request_id: str) -> None:
        """End a request."""
        await self._do(lambda: self._abort(request_id))

    def _abort(self, request_id: str) -> None:
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            self.engine.abort_request([request_id])
            _answer(answer, None)

    # --- weights -----------------------------------------------------------------------------------------------
    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Hold the running requests ("keep"), or let them end first ("wait"). See AsyncLLM."""
        if mode == "wait":
            drained: Future[None] = Future()
            await self._do(lambda: self._drain(drained))
            await asyncio.wrap_future(drained)
        await self._do(lambda: self._core.pause_scheduler("keep", clear_cache))

    def _drain(self, drained: Future[None]) -> None:
        self._core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        self._drained.append(drained)

    async def resume_generation(self) -> None:
        """Go on with the requests that were held, and those that have come since."""
        await self._do(lambda: self._core.resume_scheduler())

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
        """Call a method of vLLM's worker; a list of its one answer."""
        return await self._do(lambda: self.engine.collective_rpc(method, args=args, kwargs=kwargs))

    async def start_profile(self) -> None:
        """See AsyncLLM; on the thread, which is the one that is recorded."""
        await self._do(lambda: self.engine.start_profile())

    async def stop_profile(self) -> None:
        """See AsyncLLM."""
        await self._do(lambda: self.engine.stop_profile())

    async def update_weight_version(self, version: str) -> None:
        """Name the weights that tokens are sampled with from now on."""
        await self._do(lambda: self.engine.set_weight_version(version))

    # --- the thread --------------------------------------------------------------------------------------------
    def shutdown(self) -> None:
        """End the thread and the engine."""
        self._orders.put(None)
        self._thread.join()

    @property
    def _core(self) -> Any:
        return self.engine.engine_core.engine_core

    def _send(self, order: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        self._orders.put((order, answer))
        if self.errored:  # perhaps nobody takes it
            self._refuse()
        return answer

    async def _do(self, order: Callable[[], Any]) -> Any:
        """Have the thread call `order` between two steps."""
        return await asyncio.wrap_future(self._send(order))

    def _run(self, arguments: Any, started: Future[Any]) -> None:
        try:
            engine = LLMEngine.from_engine_args(arguments)
        except BaseException as error:  # noqa: BLE001 - raised where the engine is awaited
            started.set_exception(error)
            return
        self.engine = engine
        started.set_result(engine)
        try:
            while self._obey():
                self._step()
        except Exception as error:  # noqa: BLE001 - vLLM's step has failed, and with it all requests
            self.errored, self._failure = True, f"{type(error).__name__}: {error}"
            for answer in [*self._answers.values(), *self._drained]:
                _answer(answer, error)
            self._refuse()
        finally:
            engine.engine_core.shutdown()

    def _obey(self) -> bool:
        """Carry out what has been ordered, at least one order if there are no requests to run; False: end."""
        wait = not self._core.scheduler.has_requests()
        while wait or not self._orders.empty():
            item = self._orders.get()
            if item is None:
                return False
            order, answer = item
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(order())
                except Exception as error:  # noqa: BLE001 - raised where the order is awaited
                    answer.set_exception(error)
            wait = not self._core.scheduler.has_requests() and not self._drained
        return True

    def _step(self) -> None:
        scheduler = self._core.scheduler
        if scheduler.has_requests():
            for output in self.engine.step():
                if output.finished and (answer := self._answers.pop(output.request_id, None)) is not None:
                    _answer(answer, output)
            self.load = EngineLoad(*scheduler.get_request_counts())
        if self._drained and not scheduler.has_requests():
            for drained in self._drained:
                _answer(drained, None)
            self._drained.clear()

    def _refuse(self) -> None:
        """Fail the orders that nobody carries out any more."""
        while not self._orders.empty():
            item = self._orders.get()
            if item is not None:
                _answer(item[1], RuntimeError(f"the engine has failed before, by {self._failure}"))


def _answer(future: Future[Any], value: Any) -> None:
    """Give an answer, or an error, to one who may not wait any more."""
    if future.set_running_or_notify_cancel():
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)
