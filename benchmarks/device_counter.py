"""Counts what a GPU would be asked to do, on tensors of torch's meta device: they have sizes, and no memory.

A meta tensor stands for one on a GPU. Under `DeviceCounter` it can also be read, which on a GPU means that the host
waits: what is read is made up, but for numbers that came from the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
# Operations of attention for a pair, a head and its width: two products forward, five backward.
ATTENTION = {"attention": 4.0, "attention_backward": 10.0}
ATTENTION_SUMS = "attention_sums"
# They make a tensor without writing it, or look at one.
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"}
NO_KERNEL |= {"_unsafe_view", "resize_", "set_", "record_stream", "wait_tensor"}
# They read so many rows of a table as they return, not the whole table; these write so many as they are given.
TAKES, PUTS = {"embedding", "gather", "index", "index_select"}, {"scatter_add_", "scatter_", "index_put_"}
# Of a collective's arguments the first is written.
COLLECTIVES = {"c10d", "_c10d_functional"}


@dataclass
class Counts:
    """What the device is asked to do.

    Attributes:
        launches: kernels, one for each operation that computes or copies.
        products: of these, matrix products and attention.
        flops: operations of these products.
        attention_flops: of these, attention's.
        bytes: that all other kernels read and write.
        waits: times that the host waits for a number of the device.
        copies: from the host to the device.
        copied: bytes of these.
        blocking: of these copies, those that the host waits for: not asked for as `non_blocking`.
        collectives: of any kind.
        sent: bytes of their whole tensors.
    """

    launches: float = 0
    products: float = 0
    flops: float = 0
    attention_flops: float = 0
    bytes: float = 0
    waits: float = 0
    copies: float = 0
    copied: float = 0
    blocking: float = 0
    collectives: float = 0
    sent: float = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Counts) -> Counts:
        return self + other * -1

    def __mul__(self, factor: float) -> Counts:
        return Counts(*(getattr(self, f.name) * factor for f in fields(self)))


class DeviceCounter(TorchDispatchMode):
    """Counts operations on meta tensors, by the phase in which they run.

    Attributes:
        phases: the counts of each phase.
        kernels: launches and bytes of each operation, by phase and name.
        phase: the present one.
        paused: whether nothing is counted.
    """

    def __init__(self, phase: str = "") -> None:
        super().__init__()
        self.phases: dict[str, Counts] = defaultdict(Counts)
        self.kernels: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0])
        self.phase, self.paused = phase, False
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Within the block nothing is counted."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def kernel(self, name: str, *, bytes: float = 0, flops: float = 0, attention: bool = False) -> None:
        """Count one kernel."""
        if self.paused:
            return
        product = flops > 0
        self.phases[self.phase] += Counts(1, product, flops, flops if attention else 0, 0 if product else bytes)
        of_name = self.kernels[self.phase, name]
        of_name[0] += 1
        of_name[1] += 0 if product else bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls the operations on its shards, which come here again
        name = func.overloadpacket._qualified_op_name.rpartition("::")[2]
        mine = [leaf for leaf in tree_leaves((args, kwargs)) if _is_device(leaf)]
        if func.namespace in COLLECTIVES and name != "wait_tensor":
            return self._collective(func, mine, args, kwargs)
        if mine and name in ("_local_scalar_dense", "nonzero", "masked_select"):
            return self._read(mine[0], name)
        moved = self._moved(name, mine, args, kwargs)
        if moved is not None:
            return moved
        if name.startswith("_fused_"):
            out = None  # updates what it is given
        else:
            out = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(out) if _is_device(leaf)]
        if (mine or results) and not func.is_view and name not in NO_KERNEL:
            self.kernel(
                name,
                bytes=moved_bytes(func, name, args, kwargs, results),
                flops=flops_of(name, args, results[0]) if results else 0,
                attention=name in ATTENTION,
            )
            if name == "attention_backward":  # the sums of its first kernel
                self.kernel(ATTENTION_SUMS, bytes=2 * size_of(args[0]))
        return out

    def _read(self, tensor: Tensor, name: str) -> Any:
        """Return numbers of the device, which the host waits for."""
        self._count(waits=1)
        if name != "_local_scalar_dense":
            raise NotImplementedError(f"{name}: its size depends on values, which meta tensors do not have")
        if id(tensor) in self._known:
            return self._known[id(tensor)][1].item()
        return True if tensor.dtype == torch.bool else tensor.new_zeros((), device="cpu").item()

    def _moved(self, name: str, mine: list[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """The result of a copy between host and device, or None if the operation is none."""
        if name == "_to_copy":
            source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
        elif name == "copy_":
            source, target = args[1], args[0].device
        else:
            return None
        waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if source.device.type == target.type:
            return None
        if source.device == META:
            self._count(waits=waits)
            made = torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        else:
            self._count(copies=1, copied=source.numel() * source.element_size(), blocking=waits)
            made = torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype, device=META)
            if source.numel() == 1:
                self._known[id(made)] = made, source
        return made if name == "_to_copy" else args[0]

    def _collective(self, func: Any, mine: list[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Count a collective; none of the other ranks is there."""
        if mine:
            self._count(collectives=1, sent=max(tensor.numel() * tensor.element_size() for tensor in mine))
        if not mine or func.namespace == "_c10d_functional":
            return func(*args, **kwargs)
        group = next(arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()))
        work = torch.ops.c10d.barrier(torch.zeros(1), group, [], False, -1)
        results = func._schema.returns
        return work if len(results) == 1 else (args[0], work)

    def _count(self, **counts: float) -> None:
        if not self.paused:
            self.phases[self.phase] += Counts(**counts)


def moved_bytes(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: list[Tensor]) -> float:
    """Bytes that an operation which is no product has to read and write: each element of each tensor once."""
    written, read = sum(map(size_of, results)), 0.0
    named = zip(func._schema.arguments, args, strict=False)
    arguments = [*named, *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs)]
    tensors = [(a, leaf) for a, value in arguments for leaf in tree_leaves(value) if _is_device(leaf)]
    if name in TAKES:
        return 2 * written + sum(size_of(leaf) for _, leaf in tensors[1:])
    if name in PUTS:
        given = sum(size_of(leaf) for _, leaf in tensors[1:])
        return given + 2 * size_of(tensors[-1][1])
    for argument, tensor in tensors:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and not any(tensor is result for result in results):
            written += size_of(tensor)
        if not (
            writes and (name in ("zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_") or argument.kwarg_only)
        ):
            read += size_of(tensor)
    return read + written


def size_of(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor; those that it repeats count once."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(extent for extent, stride in extents if stride != 0) * tensor.element_size()


def flops_of(name: str, args: Sequence[Any], result: Tensor) -> float:
    """Operations of a matrix product, or of attention under the mask of a micro-batch; 0 of others."""
    if name in ATTENTION:
        return float(ATTENTION[name] * args[-1] * result.shape[1] * result.shape[3])
    if name not in PRODUCTS:
        return 0.0
    left = args[1] if name.startswith(("addm", "badd")) else args[0]
    return 2.0 * result.numel() * left.shape[-1]


def _is_device(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "meta"
