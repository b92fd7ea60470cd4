"""What workers and agent loops ask of an engine, whichever it is, and the engines by name.

A rollout engine samples responses, and a new one is a class with the methods of `RolloutEngine`; the train engine
(train/fsdp_engine.py) computes log-probs and takes optimizer steps. Loads neither torch nor vLLM.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from grpo_dist.engines.settings import EngineSettings, GroupAddress, SamplingSettings
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.registry import described, load_attribute, wrong_return

if TYPE_CHECKING:
    import numpy as np

    from grpo_dist.engines.weights.buckets import Bucket
    from grpo_dist.protocol import Metric, Ragged

ENGINE_KEY = "actor_rollout_ref.rollout.name"
# Its values -> what makes one; plugins/names.py has the names too, and a test compares them.
ROLLOUT_ENGINES = {"vllm": "grpo_dist.engines.vllm:vllm_engine"}
FSDP = "grpo_dist.engines.train.fsdp_engine:FSDPEngine"


# --- rollout -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Response:
    """One response, token by token.

    Attributes:
        log_probs: of each token, in nats, temperature applied.
        weight_versions: of the weights that sampled each token; -1: those of the model folder.
        stop: the text that ended it; None: the end-of-sequence token, or it was cut short.
        mask: 1 on tokens that were sampled, 0 on those an environment put in; None: all were sampled.
        num_turns: how often the policy was sampled for it.
        predecessors: the token that each one follows, see protocol/sequences.py; None: it has no branches.
        routes: the experts of its tokens, and before them of the prompt's (protocol/sequences.py); the first ones may
            be missing; None: they are not recorded.
    """

    token_ids: list[int]
    log_probs: list[float]
    truncated: bool
    weight_versions: list[int]
    stop: str | None = None
    mask: list[int] | None = None
    num_turns: int = 1
    predecessors: list[int] | None = None
    routes: np.ndarray | None = None


class RequestRefused(ValueError):
    """A request of an agent that is not sampled; its client is told why, with status 400, and does not try again."""


# How an OpenAI app asks for a sample: (prompt, most tokens, texts that stop it) -> what was sampled.
AppSample = Callable[[list[int], int | None, Sequence[str]], Awaitable[Response]]


class ToolCall(NamedTuple):
    """A call of a tool as the policy wrote it: its name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


# Finds the calls in what the policy wrote in a turn, special tokens included; there may be none.
ParseCalls = Callable[[str], Sequence[ToolCall]]


@dataclass(frozen=True)
class EngineLoad:
    """Sequences that run in an engine, and that wait in it, after its last step."""

    running: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class Footprint:
    """The memory that a started engine holds on each of its GPUs, in GiB: in total, and the part that is KV cache."""

    total_gib: float
    kv_cache_gib: float


class EngineWeights(Protocol):
    """The weights of a rollout engine: their version, and how new ones come in.

    New weights come as buckets (`load`), or over a process group that the engine has joined (`join`, then `receive`).
    `version` is that of the weights in force; -1: those of the model folder.
    """

    version: int

    async def pause(self) -> None:
        """Hold the running requests, or let them end first, until new weights have come."""

    async def sleep(self) -> None:
        """Release the GPUs' memory until new weights have come."""

    async def load(self, buckets: Sequence[Bucket], version: int) -> None:
        """Replace all weights by those in the buckets.

        Raises:
            WeightSyncError: a bucket is damaged or missing; the weights in force stay.
        """

    async def join(self, address: GroupAddress, first_rank: int) -> None:
        """Join a weight group. The engine's workers take the ranks from `first_rank` on.

        Raises:
            WeightSyncError: the group was not formed.
        """

    async def receive(self, version: int) -> None:
        """Replace all weights by those that the actor sends to the group.

        Raises:
            WeightSyncError: a bucket was damaged or did not come; the message says which weights are in force.
        """


class RolloutEngine(Protocol):
    """Samples responses to prompts. `weights` are there once it has started."""

    settings: EngineSettings
    load: EngineLoad
    weights: EngineWeights

    def __init__(self, settings: EngineSettings) -> None: ...

    async def start(self) -> Footprint | None:
        """Load the model.

        Returns:
            The memory that the engine took; None without GPUs.
        """

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingSettings, request_id: str | None = None
    ) -> list[Response] | None:
        """Sample `sampling.n` responses to one prompt. Calls run at the same time.

        Args:
            prompt: token ids.
            request_id: a name for `abort`.

        Returns:
            The responses; None if the request was aborted.

        Raises:
            BatchError: the prompt does not fit the model.
            ConfigError: the engine refuses the sampling settings.
            EngineError: the engine failed, and is replaced.
        """

    async def abort(self, request_id: str) -> None:
        """End the requests of this name; nothing happens if there are none."""

    def shutdown(self) -> None:
        """Stop the engine and every process that it started."""


def rollout_engine(name: str) -> Callable[[EngineSettings], RolloutEngine]:
    """Return the function that makes a rollout engine, or the class of a custom one.

    Args:
        name: one of `ROLLOUT_ENGINES`, or `pkg.module:Class`, or `path/to/file.py:Class`.

    Raises:
        ConfigError: there is no such class, or it lacks a method of a rollout engine.
    """
    if name in ROLLOUT_ENGINES:
        return cast(Callable[[EngineSettings], RolloutEngine], load_attribute(ROLLOUT_ENGINES[name], key=ENGINE_KEY))
    engine_class: type[RolloutEngine] = load_attribute(name, key=ENGINE_KEY)
    methods = ("start", "generate", "abort", "shutdown")
    if missing := [method for method in methods if not callable(getattr(engine_class, method, None))]:
        raise ConfigError(f"{ENGINE_KEY}={name}: it lacks {', '.join(missing)}; see RolloutEngine in {__name__}")
    return engine_class


def check_responses(engine: RolloutEngine, returned: Any, n: int) -> None:
    """Check what `generate` of a rollout engine has returned.

    Args:
        returned: what it returned, if the request was not aborted.
        n: responses that it was asked for.

    Raises:
        ConfigError: they are not so many responses, or their tokens have no log-prob or weight version each.
    """
    expected = f"a list of {n} Response of {__name__}; None for a request that was aborted"
    fault = None
    if not isinstance(returned, list | tuple) or len(returned) != n:
        fault = described(returned), expected
    for i, response in enumerate(() if fault else returned):
        if not isinstance(response, Response):
            fault = f"[{i}] = {described(response)}", expected
            break
        tokens, mask = response.token_ids, response.token_ids if response.mask is None else response.mask
        lengths = [len(column) for column in (tokens, response.log_probs, response.weight_versions, mask)]
        if len(set(lengths)) > 1:
            got = f"response {i} with lengths of token_ids, log_probs, weight_versions, mask = {lengths}"
            fault = got, f"{expected}; one of each for a token"
    if fault:
        name = f"{inspect.getfile(type(engine))}:{type(engine).__name__}"
        raise wrong_return(ENGINE_KEY, name, "rollout engine", fault)


# --- training ------------------------------------------------------------------------------------------------------
class MiniBatchResult(NamedTuple):
    """The metrics of an optimizer step; on policy also the log-probs (nats, a row each) of its forward pass."""

    metrics: dict[str, Metric]
    log_probs: Ragged | None
