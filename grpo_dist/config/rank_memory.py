"""Estimates the device memory of one FSDP rank, in bytes.

The memory of a training rank is computed at the points of a mini-batch where it may peak: start of the forward pass,
start of the backward pass, backward of the output layer, backward of a decoder layer, gradient reduction of the root
unit, optimizer step. The estimate is the largest. tests/config/test_memory.py compares it with torch's memory tracker.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import TYPE_CHECKING

from grpo_dist.config.model_shape import ModelShape
from grpo_dist.sizes import CHUNK_LOGITS

if TYPE_CHECKING:  # the estimate itself needs none of the packages that read configs
    from grpo_dist.config.schema import RunConfig
    from grpo_dist.config.schema_roles import Device

# GiB of GPU memory per process besides its tensors: CUDA context, NCCL buffers, fragmentation.
CUDA_GIB = 1.0
# GiB of CPU memory per process besides its tensors: Python and its libraries, on GPU machines also CUDA.
PROCESS_GIB = {"cpu": 0.5, "cuda": 3.0}
ADAM_STATES = 2  # AdamW's two running means, in the type of the weights

Parts = dict[str, float]


@dataclass(frozen=True)
class Rank:
    """One rank of a sharded model; sizes in bytes unless said otherwise.

    Args:
        shape: sizes of the model.
        device: "cpu" or "cuda".
        master: bytes per stored weight.
        compute: bytes per element in forward and backward passes.
        shards: ranks that one replica of the weights is sharded over.
        reshards: whether gathered weights are freed after each layer (`reshard_after_forward`).
        factors: number of LoRA parameters; 0: all weights are trained.
        frozen: whether no weights are trained (the reference).
    """

    shape: ModelShape
    device: Device
    master: int
    compute: int
    shards: int
    reshards: bool
    factors: int = 0
    frozen: bool = False

    @property
    def weights(self) -> float:
        """Bytes of the rank's shard of the weights."""
        return (self.shape.num_parameters + self.factors) * self.master / self.shards

    @property
    def trained(self) -> int:
        """Number of trainable parameters, of all shards together."""
        return self.factors or self.shape.num_parameters

    @property
    def states(self) -> float:
        """Bytes of the rank's shard of the optimizer states."""
        return ADAM_STATES * self.trained * self.master / self.shards

    def gathered(self, layers: int) -> float:
        """Bytes of the weights, in the compute dtype, while `layers` layers and the root unit are gathered.

        A single rank copies its weights too, even without a change of dtype, unless it is frozen.
        """
        if self.shards == 1 and self.frozen and self.master == self.compute:
            return 0.0
        if self.shards > 1 and self.reshards:
            return (self.shape.root + layers * self.shape.layer) * self.compute
        return float(self.shape.num_parameters * self.compute)

    def layer_activations(self, tokens: int) -> float:
        """Bytes of the activations that a layer saves for backward: four norms in float32 (as in Qwen3), the inputs
        of the matrices, the outputs of each token's experts and, if experts are trained, their inputs.
        """
        shape, compute = self.shape, self.compute
        attention = shape.query_width + shape.key_width
        per_token = 2 * shape.hidden * (4 + 2 * compute) + attention * (4 + 3 * compute) + 4 * shape.width * compute
        copies = shape.copies * (1 if self.factors else 2)
        return tokens * (per_token + copies * compute)

    def chunk(self, responses: int) -> float:
        """Bytes of the logits that exist at once, in float32."""
        rows = max(1, CHUNK_LOGITS[self.device] // self.shape.vocabulary)
        return 4.0 * min(rows, responses) * self.shape.vocabulary

    def gathering(self) -> float:
        """Bytes of gathered weights at the start of a pass, when all-gather buffers still exist besides the weights."""
        return 2.0 * (self.shape.root + self.shape.layer) * self.compute if self.shards > 1 else self.gathered(0)

    def forward(self, tokens: int, responses: int) -> Parts:
        """The peak of a pass without gradients: at its start, in a layer, or at the logits and their softmax."""
        shape = self.shape
        layer = tokens * (3 * shape.width + 4 * shape.hidden + 4 * shape.copies) * self.compute
        logits = tokens * shape.hidden * self.compute + 2 * self.chunk(responses)
        start, later = (self.gathering(), 0.0), (self.gathered(2), max(layer, logits))
        gathered, activations = max(start, later, key=sum)
        return {"weights": self.weights, "gathered weights": gathered, "activations": activations}


class MiniBatch:
    """Memory of a training rank at the points of a mini-batch where it may peak.

    Args:
        rank: the rank.
        tokens: tokens of the largest micro-batch, at least one.
        responses: response tokens of that micro-batch.
        recomputes: whether layers save only their inputs (gradient checkpointing).
        saves_on_cpu: whether these wait in CPU memory, but for those of the layer that is at work (activation offload).
        entropies: whether the loss has an entropy term.
        defers: whether gradients are reduced only in the last micro-batch (`defer_grad_sync`).
        offloads: whether optimizer states are on the device only during the optimizer step.
        has_output_layer: whether the model has one; false: its head has few outputs.

    Attributes:
        saved_on_cpu: bytes of CPU memory of what waits there.
    """

    def __init__(
        self,
        rank: Rank,
        tokens: int,
        responses: int,
        *,
        recomputes: bool,
        saves_on_cpu: bool = False,
        entropies: bool = False,
        defers: bool = False,
        offloads: bool = False,
        has_output_layer: bool = True,
    ) -> None:
        self.rank, self.shape, self.compute = rank, rank.shape, rank.compute
        self.tokens = tokens
        self.inputs = self.tokens * rank.shape.hidden * rank.compute
        layer = rank.layer_activations(self.tokens)
        self.kept_by_layers, self.saved_on_cpu = rank.shape.num_layers * (self.inputs if recomputes else layer), 0.0
        if saves_on_cpu and rank.device == "cuda":
            # pinned blocks have sizes of powers of two
            self.kept_by_layers, self.saved_on_cpu = self.inputs, rank.shape.num_layers * 2.0 ** ceil(log2(self.inputs))
        self.recomputed = layer if recomputes else 0.0
        self.chunk, self.entropies = rank.chunk(responses), entropies
        self.trains_all = rank.factors == 0
        self.output_layer = rank.shape.matrix * self.trains_all * has_output_layer
        # Gradients stay unsharded, in float32, until the last micro-batch.
        self.whole = defers or rank.shards == 1
        sharded = rank.trained * rank.master / rank.shards
        self.kept = {"weights": rank.weights, "gradients": rank.trained * 4.0 if self.whole else sharded}
        self.step = {"weights": rank.weights, "gradients": sharded, "optimizer": rank.states}
        if not offloads:
            self.kept["optimizer"] = rank.states

    def peak(self) -> Parts:
        """Memory at the largest of these points, by purpose."""
        moments = [self._start(), self._backward_start(), self._head(), self._layer(), self._root(), self.step]
        return max(moments, key=lambda parts: sum(parts.values()))

    def _start(self) -> Parts:
        """Start of the forward pass: embedding, head and the first layer are gathered."""
        return {**self.kept, "gathered weights": self.rank.gathering(), "activations": self.inputs}

    def _backward_start(self) -> Parts:
        """Between forward and backward pass, when embedding and head are gathered again."""
        again = self.shape.root * self.compute if self.rank.shards > 1 and self.rank.reshards else 0.0
        gathered, activations = self.rank.gathered(0) + again, self.kept_by_layers + self.inputs
        return {**self.kept, "gathered weights": gathered, "activations": activations, "logits": self.chunk}

    def _head(self) -> Parts:
        """Backward of the output layer: a chunk's logits and softmax, or its weight gradient and the float32 sum."""
        matrix = self.output_layer
        softmax = (4.0 if self.entropies else 2.0) * self.chunk
        product = self.chunk * self.compute / 4 + (matrix * self.compute if self.compute < 4 else 0)
        activations, gathered = self.kept_by_layers + 2 * self.inputs, self.rank.gathered(1)
        logits = matrix * 4 + max(softmax, product)
        return {**self.kept, "gathered weights": gathered, "activations": activations, "logits": logits}

    def _layer(self) -> Parts:
        """Backward of the last layer, while the weights of the layer before it are prefetched."""
        matrix, unit = self.shape.matrix * self.trains_all, self.shape.layer * self.trains_all
        flow = self.tokens * (2 * self.shape.width + 4 * self.shape.hidden + 2 * self.shape.copies) * self.compute
        return {
            **self.kept,
            "gathered weights": self.rank.gathered(3),
            "activations": self.kept_by_layers + self.recomputed + flow,
            "gradients of a layer": matrix * self.compute + self._reduced(unit, 0),
        }

    def _root(self) -> Parts:
        """Gradients of embedding and head, computed and then reduced."""
        rank, matrix, root = self.rank, self.shape.matrix * self.trains_all, self.shape.root * self.trains_all
        # Without resharding, weights stay gathered between micro-batches; the first one has no gradients of them yet.
        stays = max(0.0, rank.gathered(0) - root * rank.master / rank.shards)
        stays *= not (rank.reshards or self.whole)
        reduced = stays + self._reduced(root, 0 if self.shape.tied else self.output_layer)
        computed = rank.gathered(0) + (matrix + self.output_layer) * self.compute
        return {**self.kept, "gradients of embedding and head": max(computed, reduced)}

    def _reduced(self, numbers: int, last: int) -> float:
        """Bytes of a unit's float32 gradients with their source, or with their shard and that of the last unit."""
        source, shard = numbers * self.compute, numbers * 4.0 / self.rank.shards + last * self.compute
        return numbers * 4.0 + (0.0 if self.whole else max(source, shard))


def pass_tokens(config: RunConfig, role: str, sequences: int, limit: int | None) -> tuple[int, int]:
    """(tokens, response tokens) on a rank of the largest pass with `sequences` sequences or, if given, `limit` tokens.

    Of ranks that split a pass one may have response tokens only.
    """
    roles, data = config.actor_rollout_ref, config.data
    n, longest, ranks = roles.rollout.n, data.max_response_length, config.sequence_parallel_size(role)
    prompts = -(-sequences // n) if roles.shares_prompts else sequences
    tokens = limit or prompts * data.max_prompt_length + sequences * longest
    share = -(-tokens // ranks)
    return share, min(share, limit or sequences * longest)
