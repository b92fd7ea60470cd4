"""Attention: FlexAttention against SDPA, and the layouts that rest on it against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks import workload
from benchmarks.gpu_check.gpu import median_seconds
from benchmarks.gpu_check.results import largest
from benchmarks.gpu_check.update import LAYOUTS, freed
from benchmarks.gpu_check.work import Work
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.attention import GRADIENT_TOLERANCE, block_mask, dense_mask, flex_attention_forward
from grpo_dist.engines.train.forward import TOLERANCE
from grpo_dist.engines.train.micro_batch import make_micro_batch
from grpo_dist.engines.train.model_loading import DTYPES

# Graphs that all lengths together may take, of masks and of the kernel. Dynamo gives up at as many of either.
MOST_GRAPHS = 8
# From so many tokens on FlexAttention must not be slower than SDPA; below, starting its kernels costs more.
LONG = 8192
# Micro-batches of so many rows of two tokens. A single one has a graph of its own.
ROWS_OF_TWO = (1, 4)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(work: Work) -> None:
    """Output, gradients and time under the mask of a shared prompt, at growing lengths; then at changing ones.

    Rows of two tokens come first: later the kernel of longer ones might be there, and be taken.
    """
    for rows in ROWS_OF_TWO:
        _rows_of_two(work, rows)
    short = counters["stats"]["unique_graphs"]
    for tokens in work.scale.attention:
        _compare(work, tokens)
    _causal(work, work.scale.attention[-1])
    before = counters["stats"]["unique_graphs"]
    for tokens in work.scale.changing:
        segments = _segments(work, tokens)
        _forward_backward(_flex(segments), _inputs(work, segments.shape[2]))
    if work.device == "cpu":
        work.found.missing("compiled graphs", "the kernels are compiled on a GPU only")
        return
    graphs = counters["stats"]["unique_graphs"]
    more = f"{graphs - before} of them at {len(work.scale.changing)} other lengths; {short} more for rows of two tokens"
    work.found.right("compiled graphs", graphs - short, MOST_GRAPHS, note=more)


def _compare(work: Work, tokens: int) -> None:
    segments, name = _segments(work, tokens), f"{tokens:,} tokens"
    inputs, flex, sdpa = _inputs(work, tokens), _flex(segments), _sdpa(dense_mask(segments))
    _difference(work, name, inputs, flex, sdpa)
    rounds = work.scale.rounds
    flex_s = median_seconds(partial(_forward_backward, flex, inputs), work.device, rounds=rounds)
    sdpa_s = median_seconds(partial(_forward_backward, sdpa, inputs), work.device, rounds=rounds)
    work.found.note(f"{name}: FlexAttention, forward and backward", flex_s * 1e3, "ms")
    least = 1.0 if tokens >= LONG else 0.0
    work.found.at_least(f"{name}: SDPA under the same mask takes", sdpa_s / flex_s, least, "x")


def _difference(work: Work, name: str, inputs: list[Tensor], flex: Attend, sdpa: Attend) -> None:
    found, expected = _forward_backward(flex, inputs), _forward_backward(sdpa, inputs)
    off = largest(float((a - b).float().norm() / b.float().norm()) for a, b in zip(found, expected, strict=True))
    tolerance = GRADIENT_TOLERANCE[DTYPES[work.compute]]
    work.found.right(f"{name}: difference of output and gradients, relative", off, tolerance)


def _rows_of_two(work: Work, rows: int) -> None:
    """Prompts and responses of one token each: of so short rows torch would have a kernel for decoding take care."""
    segments = make_micro_batch(workload.batch(rows, 1, 1, 1, vocab=100), (), 0, layout="shared").segments
    assert segments is not None
    assert segments.shape == (2, rows, 2)
    segments, name = segments.to(work.device), f"rows of 2 tokens, {rows} of them"
    made: list[None] = []
    with made_for_decoding(made) if work.device == "cuda" else nullcontext():
        _difference(work, name, _inputs(work, 2, rows), _flex(segments), _sdpa(dense_mask(segments)))
    if work.device == "cpu":
        work.found.missing(f"{name}: kernels for decoding", "the kernels are compiled on a GPU only")
    else:
        work.found.right(f"{name}: kernels for decoding", len(made), 0)


@contextmanager
def made_for_decoding(made: list[None]) -> Iterator[None]:
    """`made` gets an entry for each kernel for decoding that the compiler makes in the block; its cache is off."""
    from torch._inductor import config
    from torch._inductor.kernel.flex import flex_attention as lowering

    create = lowering.create_flex_decoding_kernel

    def counted(*args: Any, **options: Any) -> Any:
        made.append(None)
        return create(*args, **options)

    with mock.patch.object(lowering, "create_flex_decoding_kernel", counted), config.patch(force_disable_caches=True):
        yield


def _causal(work: Work, tokens: int) -> None:
    """A single sequence, for which SDPA needs no mask and takes its fastest kernel."""
    inputs = _inputs(work, tokens)
    flex = _flex(torch.zeros(2, 1, tokens, dtype=torch.int32, device=work.device))
    times = [
        median_seconds(partial(_forward_backward, way, inputs), work.device, rounds=work.scale.rounds)
        for way in (flex, _sdpa(None))
    ]
    work.found.note(f"{tokens:,} tokens, one sequence: causal SDPA takes", times[1] / times[0], "x of FlexAttention's")


def _segments(work: Work, tokens: int) -> Tensor:
    """(2, 1, about `tokens`): a prompt of an eighth of them, and eight responses, as a micro-batch has them."""
    prompt = tokens // 8
    data = workload.batch(1, 8, prompt, (tokens - prompt) // 8, vocab=100, equal=True)
    segments = make_micro_batch(data, (), 0, layout="shared").segments
    assert segments is not None
    return segments.to(work.device)


def _inputs(work: Work, tokens: int, rows: int = 1) -> list[Tensor]:
    """Queries, keys and values, heads behind tokens in memory, as projections leave them."""
    config = work.scale.model
    counts = [config["num_attention_heads"], *[config["num_key_value_heads"]] * 2]
    generator = torch.Generator(work.device).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": work.device, "dtype": DTYPES[work.compute]}
    made = [torch.randn(rows, tokens, count, config["head_dim"], **options) for count in counts]
    return [each.transpose(1, 2).detach().requires_grad_() for each in made]


def _flex(segments: Tensor) -> Attend:
    mask = block_mask(segments)
    return lambda q, k, v: flex_attention_forward(nn.Module(), q, k, v, mask)[0]


def _sdpa(mask: Tensor | None) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # repeated by hand: with `enable_gqa` a mask leaves SDPA the kernel that holds all pairs
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return out.transpose(1, 2).contiguous()

    return attend


def _forward_backward(attend: Attend, inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of its half square; on CPU, where FlexAttention has none, the output."""
    if inputs[0].device.type == "cpu":
        return [attend(*(each.detach() for each in inputs))]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, out.detach())]


def layouts(work: Work) -> None:
    """Log-probs of every layout against padded sequences in the same compute type."""
    workload.join_process_group(work.device)
    sizes = work.scale.compared
    data = workload.batch(sizes.groups, sizes.n, sizes.prompt, sizes.response, work.scale.model["vocab_size"])
    references: dict[str, Tensor] = {}
    for compute in ("fp32", "bf16"):
        for layout in ("padded", *(each for each in LAYOUTS if each != "padded")):
            engine = workload.engine(str(work.model), layout, work.device, compute=compute, trains=False)
            found = engine.compute_log_probs(data, PassLimits("", sizes.n)).values
            work.found.right(f"{layout}, {compute}: fell back", engine.forward.layout != layout, 0, note=_why(engine))
            reference = references.setdefault(compute, found)
            if found is not reference:
                off = (found - reference).abs()
                mean, most = float(off.mean()), f"at most {float(off.max()):.2g}"
                tolerance = TOLERANCE[DTYPES[compute]]
                work.found.right(f"{layout}, {compute}: mean difference", mean, tolerance, "nats", note=most)
            del engine
            freed()
    rounding = float((references["bf16"] - references["fp32"]).abs().mean())
    work.found.note("padded, bf16 against fp32: mean difference", rounding, "nats")


def _why(engine: Any) -> str:
    return engine.forward.report if engine.forward.layout != engine.forward.wanted else ""
