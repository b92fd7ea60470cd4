"""What compiled code asks of a GPU, by the plan of torch's compiler: nothing is compiled, and no GPU is needed.

`torch.compile` traces a function and cuts it into a forward and a backward graph, and Inductor groups the operations
of each graph into kernels. All that runs here as it does for a GPU, up to the plan of the kernels; writing them in
Triton is left out.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from benchmarks.device_counter import ATTENTION, ATTENTION_SUMS, DeviceCounter, flops_of, size_of

GPU = torch.device("cuda", 0)
# What Inductor asks of an H100.
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 * 2**30,
    shared_memory_per_block_optin=232_448,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)
_compile = torch.compile


@dataclass
class Plan:
    """The kernels of a function's graphs: arguments of `DeviceCounter.kernel`."""

    forward: list[dict[str, Any]] = field(default_factory=list)
    backward: list[dict[str, Any]] = field(default_factory=list)


class PlanningCompiler:
    """Stands in for `torch.compile`: what it returns counts the kernels of its plan, and computes sizes only.

    Args:
        counter: of the kernels.
        plans: that are there, to which others are added; functions of one name are alike.
    """

    def __init__(self, counter: DeviceCounter, plans: dict[Any, Plan]) -> None:
        self.counter, self._plans = counter, plans

    def __call__(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return functools.partial(self._run, function)

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", None)
        weights = list(owner.parameters()) if isinstance(owner, nn.Module) else []
        leaves, form = tree_flatten((args, kwargs))
        shapes = tuple(
            (tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else str(type(x)) for x in leaves
        )
        key = getattr(function, "__qualname__", ""), shapes, torch.is_grad_enabled()
        if key not in self._plans:
            with _disable_current_modes():
                self._plans[key] = plan_of(function, args, kwargs)
        forms: list[Any] = []

        def run(*flat: Any) -> tuple[Any, ...]:
            new_args, new_kwargs = tree_unflatten(list(flat), form)
            results, out_form = tree_flatten(function(*new_args, **new_kwargs))
            forms.append(out_form)
            return tuple(results)

        results = _Planned.apply(run, self._plans[key], self.counter, len(leaves), *leaves, *weights)
        return tree_unflatten(list(results), forms[0])


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, plan: Plan, counter: DeviceCounter, count: int, *inputs: Any) -> Any:  # type: ignore[override]
        ctx.plan, ctx.counter = plan, counter
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
        for kernel in plan.forward:
            counter.kernel(**kernel)
        with counter.pause():
            return run(*inputs[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors  # with gradient checkpointing the forward pass is run again here
        for kernel in ctx.plan.backward:
            ctx.counter.kernel(**kernel)
        needed = ctx.needs_input_grad[4:]
        return (
            None,
            None,
            None,
            None,
            *(torch.empty_like(x) if wants else None for x, wants in zip(saved, needed, strict=True)),
        )


def plan_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Plan the kernels of a function's forward and backward pass for arguments of these sizes."""
    plan, graphs = Plan(), [0]

    def planned(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        (plan.backward if options.get("is_backward") else plan.forward).extend(kernels_of(graph, inputs))
        graphs[0] += not options.get("is_backward")

        def run(values: list[Any]) -> Any:
            given = list(values)
            values.clear()
            return graph(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    torch._dynamo.reset()
    # instead of the hooks of a gradient checkpoint, in which this may run
    own_hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    with FakeTensorMode(allow_non_fake_inputs=True), _on_host(function), own_hooks:
        backend = functools.partial(compile_fx.compile_fx, inner_compile=planned)
        new_args, new_kwargs = tree_map(_host_like, (args, kwargs))
        results = _compile(function, backend=backend, dynamic=False)(*new_args, **new_kwargs)
        roots = [x for x in tree_leaves(results) if isinstance(x, Tensor) and x.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.empty_like(x) for x in roots])
    if graphs[0] != 1:
        raise RuntimeError(f"{function} was compiled as {graphs[0]} graphs")
    return plan


def _host_like(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.device.type != "meta":
        return leaf
    made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
    return made.requires_grad_(leaf.requires_grad)


@contextmanager
def _on_host(function: Callable[..., Any]) -> Iterator[None]:
    """Within the block the weights of a method's module are on the host: meta tensors would be folded away."""
    owner = getattr(function, "__self__", None)
    held = []
    for module in owner.modules() if isinstance(owner, nn.Module) else ():
        for name, weight in module._parameters.items():
            if weight is not None:
                held.append((module, name, weight))
                module._parameters[name] = nn.Parameter(_host_like(weight.detach()), weight.requires_grad)
    try:
        yield
    finally:
        for module, name, weight in held:
            module._parameters[name] = weight


def kernels_of(graph: GraphModule, inputs: Sequence[Any]) -> list[dict[str, Any]]:
    """Plan the kernels of one graph on an H100."""
    graph, mode = copy.deepcopy(graph), detect_fake_mode(inputs)
    assert mode is not None

    def on_gpu(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=GPU)

    with V.set_fake_mode(mode):
        kernels = [kernel for node in graph.graph.nodes for kernel in _products(node)]
        compile_fx.view_to_reshape(graph)
        compile_fx.record_original_output_strides(graph)
        compile_fx._recursive_post_grad_passes(graph, is_inference=False)
    with mode:
        given = [on_gpu(leaf) for leaf in inputs]
        for node in graph.graph.nodes:
            node.meta["val"] = tree_map(on_gpu, node.meta.get("val"))
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": GPU}
    with _as_h100(), V.set_fake_mode(mode):
        lowered = GraphLowering(graph, example_inputs=given)
        with V.set_graph_handler(lowered), V.set_extern_kernel_nodes([]), DebugContext():
            lowered.run(*given)
            lowered._update_scheduler()
            return kernels + [
                {"name": "fused", "bytes": node.get_read_write_buffers_sizes()}
                for node in lowered.scheduler.nodes
                if not isinstance(node, ExternKernelSchedulerNode | NopKernelSchedulerNode)
            ]


def _products(node: torch.fx.Node) -> list[dict[str, Any]]:
    """The kernels of a node that is a product or attention, which Inductor leaves to libraries; none of others."""
    name = getattr(node.target, "_opname", "") if node.op == "call_function" else ""
    result = node.meta.get("val")
    result = result[0] if isinstance(result, tuple | list) else result
    args: list[Any] = [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in node.args]
    flops = flops_of(name, args, result) if isinstance(result, Tensor) else 0
    if not flops:
        return []
    sums = [{"name": ATTENTION_SUMS, "bytes": 2 * size_of(args[0])}] if name == "attention_backward" else []
    return [{"name": name, "flops": flops, "attention": name in ATTENTION}, *sums]


@contextmanager
def _as_h100() -> Iterator[None]:
    """Within the block the compiler finds an H100."""
    answers = (
        (torch.cuda, "get_device_properties", lambda device=None: H100),
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "current_device", lambda: 0),
        (CudaInterface, "is_available", staticmethod(lambda: True)),
        (CudaInterface, "get_device_properties", staticmethod(lambda device=None: H100)),
        (CudaInterface, "get_compute_capability", staticmethod(lambda device=None: 90)),
        (CudaInterface.Worker, "get_device_properties", staticmethod(lambda device=None: H100)),
        (scheduler, "has_triton", lambda *arguments: True),
    )
    with ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, answer))
        yield
