"""Peak GPU memory of one training rank without a GPU: the engine's own code over fake tensors, seen by torch's tracker.

Fake tensors have shapes and no data, and a fake process group has ranks and no processes, so a 32B model on 16 ranks
takes a minute. What is not the engine's own here: the model is built from its config rather than read from files, the
attention kernel (`_KernelMemory`), and numbers read from tensors, which are all 1.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_dist.config.schema_roles import AdamWConfig
from grpo_dist.engines.settings import ModelSettings
from grpo_dist.engines.train import attention, forward, fsdp_model, lm_head, objectives
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.model_loading import DTYPES, UnloadedModel
from grpo_dist.engines.train.optimizer import move_states
from grpo_dist.engines.train.ulysses import SequenceGroup, over_heads
from grpo_dist.protocol import DataProto, Ragged
from tests.models import objective

GIB = 2**30
# Where DTensor asks for the shape of a result: the tracker would count these tensors, which are of the whole size.
_SHAPES = "_propagate_tensor_meta_non_cached"
MOVE_STATES = "grpo_dist.engines.train.optimizer.move_states"
OPTIMIZER = AdamWConfig(lr=1e-6, weight_decay=0.01, betas=(0.9, 0.999), override_optimizer_config=None)


class _KernelMemory(torch.autograd.Function):
    """What FlexAttention and FlashAttention keep and allocate: no scores, one float32 number a query and head."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        query, key, value, _, sums = ctx.saved_tensors
        _delta = torch.empty_like(sums)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    return _KernelMemory.apply(query, key, value).transpose(1, 2).contiguous(), None  # as `flex_attention_forward`


class _NoData(TorchDispatchMode):
    """What fake tensors cannot do: a number that is read from one is 1, and a fused optimizer step does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._fused_adamw_.default:
            return None  # in place; torch would count what its stand-in for fake tensors allocates
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **kwargs or {})
        if not isinstance(args[0], FakeTensor):
            return _real(func)(*args)
        dtype = args[0].dtype
        return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with real tensors, which rows and counts need."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


class _Away(torch.autograd.graph.saved_tensors_hooks):
    """`saved_in_cpu_memory` where the CPU plays the GPU: away is where nothing is counted."""

    def __init__(self, device: str) -> None:
        def here(saved: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(saved, device=device)

        super().__init__(lambda tensor: tensor.to("meta"), here)


def _to(module: torch.nn.Module, device: Any = None, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """`Module.to` for a layer that peft has made: it cannot swap fake tensors for converted ones."""
    dtype = device if isinstance(device, torch.dtype) else dtype
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, torch.nn.Parameter(parameter.detach().to(dtype=dtype)))
    return module


def _group(self: SequenceGroup, size: int = 1, device: str = "cpu") -> None:
    """Ranks that split sequences; a fake group has no limit for its waits."""
    self.size, self.rank, self.group = size, 0, dist.new_subgroups(size)[0] if size > 1 else None


class _RealRows(DataProto):
    index = _real(DataProto.index)


@contextlib.contextmanager
def _fake_ranks(number: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=number, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@_real
def sequences(groups: int, n: int, prompt: int, response: int) -> DataProto:
    """Groups of n responses, all of the same lengths."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 90, prompt) for _ in range(groups)]
    rows = [np.full(response, 7)] * (groups * n)
    columns = {name: Ragged.from_rows([np.ones(response)] * (groups * n), torch.float32)
               for name in ("old_log_probs", "ref_log_probs", "advantages")}  # fmt: skip
    return _RealRows.from_dict(
        {
            "prompts": Ragged.from_rows([p for p in prompts for _ in range(n)], torch.int32),
            "responses": Ragged.from_rows(rows, torch.int32),
            "response_mask": Ragged.from_rows([np.ones(response)] * (groups * n), torch.int8),
            **columns,
        }
    )


@contextlib.contextmanager
def fake_engine(shape: dict[str, Any], settings: ModelSettings, ranks: int, *, trains: bool) -> Iterator[FSDPEngine]:
    """A rank's engine of a model of this config.json, whose tensors are fake and count as those on a GPU."""

    def build(settings: ModelSettings, device: str, shards: int) -> UnloadedModel:
        config = transformers.AutoConfig.for_model(**{"model_type": "qwen3", **shape})
        attention._register(attention.FLEX, over_heads(_attention))
        options = {"dtype": DTYPES[settings.base_dtype], "attn_implementation": attention.FLEX}
        return UnloadedModel(transformers.AutoModelForCausalLM.from_config(config, **options).eval(), settings, [], "")

    patches = [
        mock.patch.object(fsdp_model, "open_model", build),
        mock.patch.object(fsdp_model, "load_weights"),
        mock.patch.object(fsdp_model, "draw_factors"),
        mock.patch.object(fsdp_model, "saved_in_cpu_memory", _Away),
        mock.patch.object(fsdp_model, "init_device_mesh", _real(fsdp_model.init_device_mesh)),
        mock.patch.object(fsdp_model, "world_limit"),  # fake groups have none
        mock.patch.object(fsdp_model, "_set_pg_timeout"),
        mock.patch.dict(lm_head.CHUNK_LOGITS, cpu=lm_head.CHUNK_LOGITS["cuda"]),
        mock.patch.object(torch.nn.Module, "to", _to),
        # as on CPU, any mask of four axes keeps the model from making its own of all pairs of tokens
        mock.patch.object(attention, "block_mask", return_value=torch.ones(1, 1, 1, 1, dtype=torch.bool)),
        mock.patch.object(forward, "plan_recurrence", _real(forward.plan_recurrence)),
        mock.patch.object(SequenceGroup, "__init__", _real(_group)),
        mock.patch.object(SequenceGroup, "own", _real(SequenceGroup.own)),
        mock.patch.object(objectives.PolicyObjective, "counts", _real(objectives.PolicyObjective.counts)),
        mock.patch.object(ShardingPropagator, _SHAPES, _real(getattr(ShardingPropagator, _SHAPES))),
    ]
    with _fake_ranks(ranks), contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_NoData())
        engine = FSDPEngine(settings, device="cpu", temperature=1.0, optimizer=OPTIMIZER if trains else None)
        engine.forward.report = "nothing to compare"
        engine._all_reduce = _real(lambda values, _: torch.tensor(values))  # type: ignore[method-assign]
        for owner, name in ((engine, "_plan"), (engine.forward, "micro_batch")):
            setattr(owner, name, _real(getattr(owner, name)))
        yield engine


def peak_of_update(engine: FSDPEngine, data: DataProto, **limits: Any) -> dict[str, float]:
    """GiB at the peak of an optimizer step on `data` that is not the first, by what the tracker says it is.

    The optimizer's states are there before, or wait on another device if they are offloaded. "Total" is the sum.
    """
    optimizer, offload = engine.optimizer, engine.offload
    for parameter in engine.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    offload.device = torch.device("cuda")  # not where fake tensors are, so that offloading is not left out
    tracker = FSDPMemTracker(engine.model, optimizer)
    for weight in engine.model.parameters():
        if not isinstance(weight, DTensor):  # beside LoRA's factors, where a rank has all weights: not FSDP2's
            tracker._update_and_maybe_create_winfos(weight, _FSDPRefType.SHARDED_PARAM)
    with mock.patch(MOVE_STATES, _move_states), _tracked(engine, tracker):
        if offload.optimizer_states:
            _move_states(optimizer, torch.device("cpu"))
        with tracker:
            engine.train_mini_batch(data, objective=objective(entropy_coeff=0.0), **limits)
    return _peak(tracker)


def peak_of_pass(engine: FSDPEngine, data: DataProto, **limits: Any) -> dict[str, float]:
    """The same for log-probs, of which nothing is trained."""
    tracker = FSDPMemTracker(engine.model) if isinstance(engine.model, FSDPModule) else MemTracker()
    if not isinstance(tracker, FSDPMemTracker):
        engine.model.requires_grad_(True)  # as this tracker wants it; a pass without gradients is the same
        tracker.track_external(engine.model)
    with mock.patch.object(Ragged, "from_rows"), _tracked(engine, tracker), tracker:  # whose rows need real lengths
        engine.compute_log_probs(data, **limits)
    return _peak(tracker)


def _move_states(optimizer: Any, device: torch.device, homes: Any = None) -> None:
    """`move_states` where the CPU plays the GPU: away is where nothing is counted."""
    move_states(optimizer, torch.device("meta" if device.type == "cpu" else "cpu"))


@contextlib.contextmanager
def _tracked(engine: FSDPEngine, tracker: MemTracker) -> Iterator[None]:
    run = engine.forward._run

    def fresh(*args: Any, **kwargs: Any) -> Any:
        tracker.reset_mod_stats()  # the tracker takes one forward pass at a time
        return run(*args, **kwargs)

    with mock.patch.object(engine.forward, "_run", fresh):
        yield


def _peak(tracker: MemTracker) -> dict[str, float]:
    (snapshot,) = (found for device, found in tracker.get_tracker_snapshot("peak").items() if device.type == "cpu")
    return {str(getattr(kind, "value", kind)): size / GIB for kind, size in snapshot.items()}
