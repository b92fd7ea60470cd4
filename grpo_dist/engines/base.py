"""What workers and agent loops ask of an engine, whichever it is, and what is known of an engine before it runs.

A rollout engine samples responses, and a new one is a class with the methods of `RolloutEngine`. What rules, plan and
commands ask of it stands in a `RolloutBackend`. The train engine (train/fsdp_engine.py) computes log-probs and takes
optimizer steps. Loads neither torch nor an engine.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import sysconfig
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import yaml

from grpo_dist.config import schema_roles
from grpo_dist.config.keys import Problem, between_keys, shown
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_roles import ModelConfig, RolloutConfig
from grpo_dist.engines.settings import EngineSettings, GroupAddress, SamplingSettings
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.names import ROLLOUT_ENGINES
from grpo_dist.plugins.registry import described, load_attribute, wrong_return

if TYPE_CHECKING:
    import numpy as np

    from grpo_dist.engines.weights.buckets import Bucket
    from grpo_dist.protocol import Metric, Ragged
    from grpo_dist.protocol.media import Media

ENGINE_KEY, ARGUMENTS_KEY = "actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.engine_kwargs"
_ARGUMENTS: dict[str, Any] = yaml.safe_load(
    Path(schema_roles.__file__).with_name("engine_arguments.yaml").read_text(encoding="utf-8")
)


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

    async def wake(self) -> None:
        """After `sleep` and new weights: take the rest of the memory again, and go on."""

    async def load(self, buckets: Sequence[Bucket], version: int) -> None:
        """Replace all weights by those in the buckets.

        Raises:
            WeightSyncError: a bucket is damaged or missing; the weights in force stay.
        """

    async def join(self, address: GroupAddress, first_rank: int) -> None:
        """Join a weight group, the engine's workers with the ranks from `first_rank` on.

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
        """Load the model; returns the memory that the engine took, None without GPUs."""

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingSettings,
        request_id: str | None = None,
        media: Media | None = None,
    ) -> list[Response] | None:
        """Sample `sampling.n` responses to one prompt. Calls run at the same time; `request_id` is a name for `abort`.

        `media` are the prompt's pictures; it is given only where there are some.

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


# --- what is known of an engine before it runs ---------------------------------------------------------------------
# What an engine may do besides: record the experts of its tokens, take in what has changed in weights, see pictures.
ROUTES, DIFFERENCES, IMAGES = "routes", "differences", "images"


class RolloutBackend:
    """A kind of rollout engine, as rules, plan and commands see it; this one is that of a class of the user's own.

    A built-in one is a subclass in a module that imports neither torch nor the engine at its top, named in
    `ROLLOUT_ENGINES`.

    Attributes:
        name: under which `rollout.engine_kwargs` has its arguments.
        capabilities: what it can do beyond the methods of `RolloutEngine`: `ROUTES`, `DIFFERENCES`, `IMAGES`.
        packages: the distributions that have it, of which a machine needs the first, or one that brings it too.
        reading_its_log: what to do to see why an engine gave no answer.
    """

    name = ""
    capabilities: frozenset[str] = frozenset()
    packages: tuple[str, ...] = ()
    install = ""
    reading_its_log = "read the log of its worker"

    def __init__(self, spec: str = "") -> None:
        self.spec = spec

    @property
    def _table(self) -> dict[str, Any]:
        return _ARGUMENTS.get(self.name, {})

    def given(self, rollout: RolloutConfig) -> dict[str, Any]:
        """Return the arguments that the config gives it as they are."""
        return {name: value for name, value in rollout.engine_kwargs.get(self.name, {}).items() if value is not None}

    def load(self) -> Callable[[EngineSettings], RolloutEngine]:
        """Return what makes an engine, which does not run before its `start`.

        Raises:
            ConfigError: there is no such class, or it lacks a method of a rollout engine.
        """
        engine_class: type[RolloutEngine] = load_attribute(self.spec, key=ENGINE_KEY)
        methods = ("start", "generate", "abort", "shutdown")
        if missing := [method for method in methods if not callable(getattr(engine_class, method, None))]:
            lacks = f"it lacks {', '.join(missing)}; see RolloutEngine in {__name__}"
            raise ConfigError(f"{ENGINE_KEY}={self.spec}: {lacks}")
        return engine_class

    def needs(self, device: str) -> str:
        """Say what this machine lacks to run it on `device` ("cpu" or "cuda"), and what to do; "": nothing."""
        return build_problem(device)

    def model_problem(self, model_config: Mapping[str, Any], device: str, dtype: str) -> str:
        """Say why it cannot sample from a model, by its config.json with the run's changes; "" also if unknown."""
        return ""

    def problems(self, config: RunConfig, *, seeded: bool) -> Iterator[Problem]:
        """Yield what is wrong in the keys of the rollout, the engine's own arguments among them: one that is told
        otherwise than the trainer would sample what the trainer takes for something else. `seeded`: one by one.
        """
        yield from between_keys(self._lacks)(config)
        rollout = config.actor_rollout_ref.rollout
        for engine, others in rollout.engine_kwargs.items():
            if others and self.name not in ("", engine):
                key, own = f"{ARGUMENTS_KEY}.{engine}", f"{ARGUMENTS_KEY}.{self.name}"
                yield Problem(f"{key}={shown(others)}: the engine is {self.name}; write {own}", (key, own))
        for name, value in self.given(rollout).items():
            owned = self._table.get("owned", {}).get(name)
            if owned is not None and value != owned["plain"]:
                key = f"{ARGUMENTS_KEY}.{self.name}.{name}"
                yield Problem(f"{key}={shown(value)}: {owned['why']}", (key,))

    def _lacks(self, config: RunConfig) -> Iterator[str]:
        if config.replays_routes and ROUTES not in self.capabilities:
            why = "the engine records no experts of its tokens; set the first to disabled"
            yield f"<actor.router_replay.mode>, <rollout.name>: {why}"
        if config.data.image_key is not None and IMAGES not in self.capabilities:
            yield "<data.image_key>, <rollout.name>: the engine takes no images; set the first to null"

    def adapts_experts(self, device: str) -> bool:
        """Tell if it computes experts beside LoRA's factors."""
        return True

    def inexact(self, config: RunConfig) -> dict[str, Any]:
        """Return by key those arguments that make it sample from another distribution than the trainer's."""
        given, plain = self.given(config.actor_rollout_ref.rollout), self._table.get("inexact", {})
        keys = [name for name, value in given.items() if value != plain.get(name, value)]
        return {f"{ARGUMENTS_KEY}.{self.name}.{name}": given[name] for name in keys}

    def unseeded(self, config: RunConfig) -> str:
        """Return the argument, as key=value, with which a seed gives other tokens than without it; "": none does."""
        return ""

    def exceeds_positions(self) -> bool:
        """Tell if the user lets it sample beyond the positions that the model's config.json names."""
        return False

    def keeps_sleeping_weights(self, rollout: RolloutConfig, model: ModelConfig) -> bool:
        """Tell if its weights are in CPU memory while it sleeps: those that no sync brings."""
        return False

    def keeps_graphs(self, rollout: RolloutConfig) -> bool:
        """Tell if CUDA graphs stay on the GPU, also while it sleeps."""
        return not rollout.enforce_eager

    def watchable(self, rollout: RolloutConfig) -> RolloutConfig:
        """Return the section with which every operation of its model can be watched.

        Raises:
            ConfigError: it cannot be watched.
        """
        raise ConfigError(
            f"{ENGINE_KEY}={rollout.name}: this engine cannot be watched; set it to {' or '.join(ROLLOUT_ENGINES)}"
        )

    def speaking_app(self, settings: EngineSettings) -> Callable[[AppSample], Awaitable[Any]] | None:
        """Return what makes the app of its endpoint over a function that samples, without an engine and weights.

        None: it has no endpoint without an engine.
        """
        return None

    def parser_names(self) -> list[str]:
        """Return the names of its parsers of tool calls; empty where they cannot be read."""
        return []

    def parser(self, name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]], *, key: str) -> ParseCalls:
        """Return the parser that `key` names, for tools of these JSON schemas.

        Raises:
            ConfigError: the engine refuses it.
        """
        raise ConfigError(f"{key}={name}: the engine has no parsers")


def rollout_backend(name: str) -> RolloutBackend:
    """Return what is known of an engine by its name in the config; code that this names is not loaded."""
    if name not in ROLLOUT_ENGINES:
        return RolloutBackend(name)
    backend: RolloutBackend = load_attribute(ROLLOUT_ENGINES[name], key=ENGINE_KEY)(name)
    return backend


def builtin_backends() -> list[RolloutBackend]:
    """Return what is known of each engine of this package."""
    return [rollout_backend(name) for name in ROLLOUT_ENGINES]


def build_problem(device: str) -> str:
    """Say why the installed torch cannot run on `device` ("cpu" or "cuda"), and what to do; "" if it can."""
    import torch

    if device == "cuda" and torch.version.cuda is None:
        return (
            f"torch {torch.__version__} in {sys.prefix} is the build for CPU, and the run asks for GPUs. Install the "
            "one for GPUs (`make setup DEVICE=gpu`, or `pip install -e '.[gpu]'` in an environment of its own), or set "
            "trainer.n_gpus_per_node=0"
        )
    return compiler_problem() if device == "cuda" else ""


def compiler_problem() -> str:
    """Say what Triton lacks here to compile, in C, the launchers of its kernels; "" if nothing is missing."""
    missing = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        missing.append("a C compiler (gcc or clang in PATH, or CC)")
    if not Path(headers := sysconfig.get_paths()["include"], "Python.h").is_file():
        missing.append(f"{headers}/Python.h")
    if not missing:
        return ""
    need = " and ".join(missing)
    return (
        f"Triton needs {need} to build kernels for GPUs; apt-get install gcc python3-dev, or what your system calls it"
    )


def check_responses(engine: RolloutEngine, returned: Any, n: int) -> None:
    """Check what `generate` of a rollout engine has returned for `n` responses, if the request was not aborted.

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
