"""GPU memory of a rank of a sharded model, in bytes, moment by moment.

A training rank is followed through a mini-batch: the start of a pass, its turn, the backward pass of the output layer,
that of a layer, the reduction of what is no layer, the optimizer step. Its peak is the largest of these moments.
tests/config/test_memory.py holds it against torch's memory tracker, which sees the engine's own code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_dist.config.model_shape import ModelShape

if TYPE_CHECKING:  # the plan is counted from plain numbers, also where nothing that reads configs is installed
    from grpo_dist.config.schema import RunConfig
    from grpo_dist.config.schema_roles import Device

GIB = 2**30
# GiB of a GPU for a process besides its tensors: CUDA's context, NCCL's buffers, what the allocator cannot use.
CUDA_GIB = 1.0
# GiB of CPU memory for a process besides its tensors: Python and its libraries, on a GPU CUDA's too.
PROCESS_GIB = {"cpu": 0.5, "cuda": 3.0}
ADAM_STATES = 2  # AdamW's two running means, in the type of the weights
CHUNK_LOGITS = {
    "cpu": 1 << 24,
    "cuda": 1 << 27,
}  # engines/train/lm_head.py's, which needs torch; a test keeps the two equal

Parts = dict[str, float]


@dataclass(frozen=True)
class Rank:
    """A rank of a sharded model, in bytes and numbers.

    Args:
        shape: of the model.
        device: "cpu" or "cuda".
        master: bytes of a weight.
        compute: bytes of a number in a pass.
        shards: ranks that hold the weights together.
        reshards: whether gathered weights are freed after a layer.
        factors: LoRA's numbers; 0: all weights are trained.
        frozen: whether nothing is trained.
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
        """Its shard."""
        return (self.shape.num_parameters + self.factors) * self.master / self.shards

    @property
    def trained(self) -> int:
        """Parameters that train."""
        return self.factors or self.shape.num_parameters

    @property
    def states(self) -> float:
        """The optimizer's."""
        return ADAM_STATES * self.trained * self.master / self.shards

    def gathered(self, layers: int) -> float:
        """Weights in the compute type while so many layers are gathered, and what is no layer.

        A rank that is alone copies them too, also where the type is the same, unless it is frozen.
        """
        if self.shards == 1 and self.frozen and self.master == self.compute:
            return 0.0
        if self.shards > 1 and self.reshards:
            return (self.shape.root + layers * self.shape.layer) * self.compute
        return float(self.shape.num_parameters * self.compute)

    def layer_activations(self, tokens: int) -> float:
        """What a layer keeps for its backward pass: norms in float32, as Qwen3 has four, and inputs of the matrices;
        and of each expert of a token what comes from it and, where experts train, what goes to it.
        """
        shape, compute = self.shape, self.compute
        attention = shape.query_width + shape.key_width
        per_token = 2 * shape.hidden * (4 + 2 * compute) + attention * (4 + 3 * compute) + 4 * shape.width * compute
        copies = shape.copies * (1 if self.factors else 2)
        return tokens * (per_token + copies * compute)

    def chunk(self, responses: int) -> float:
        """Logits that exist at once, in float32."""
        rows = max(1, CHUNK_LOGITS[self.device] // self.shape.vocabulary)
        return 4.0 * min(rows, responses) * self.shape.vocabulary

    def gathering(self) -> float:
        """Weights at the start of a pass, where what is no layer and the first layer exist as sent and as used."""
        return 2.0 * (self.shape.root + self.shape.layer) * self.compute if self.shards > 1 else self.gathered(0)

    def forward(self, tokens: int, responses: int) -> Parts:
        """The peak of a pass without gradients: its start, a layer's widest moment, or logits and their softmax."""
        shape = self.shape
        layer = tokens * (3 * shape.width + 4 * shape.hidden + 4 * shape.copies) * self.compute
        logits = tokens * shape.hidden * self.compute + 2 * self.chunk(responses)
        start, later = (self.gathering(), 0.0), (self.gathered(2), max(layer, logits))
        gathered, activations = max(start, later, key=sum)
        return {"weights": self.weights, "gathered weights": gathered, "activations": activations}


class MiniBatch:
    """What a training rank holds at the moments of a mini-batch that may be its peak.

    Args:
        rank: which.
        tokens: of the largest micro-batch.
        responses: response tokens of it.
        recomputes: whether layers keep their inputs only (gradient checkpointing).
        entropies: whether the loss takes entropies.
        defers: whether gradients wait whole for the last micro-batch.
        offloads: whether the optimizer's states are there only while a step is taken.
    """

    def __init__(
        self,
        rank: Rank,
        tokens: int,
        responses: int,
        *,
        recomputes: bool,
        entropies: bool = False,
        defers: bool = False,
        offloads: bool = False,
    ) -> None:
        self.rank, self.shape, self.compute = rank, rank.shape, rank.compute
        self.tokens = tokens
        self.inputs = self.tokens * rank.shape.hidden * rank.compute
        layer = rank.layer_activations(self.tokens)
        self.kept_by_layers = rank.shape.num_layers * (self.inputs if recomputes else layer)
        self.recomputed = layer if recomputes else 0.0
        self.chunk, self.entropies = rank.chunk(responses), entropies
        self.trains_all = rank.factors == 0
        # Gradients wait unsharded, in float32, for the last micro-batch.
        self.whole = defers or rank.shards == 1
        sharded = rank.trained * rank.master / rank.shards
        self.kept = {"weights": rank.weights, "gradients": rank.trained * 4.0 if self.whole else sharded}
        self.step = {"weights": rank.weights, "gradients": sharded, "optimizer": rank.states}
        if not offloads:
            self.kept["optimizer"] = rank.states

    def peak(self) -> Parts:
        """The largest moment; the last one is the optimizer step."""
        moments = [self._start(), self._turn(), self._head(), self._layer(), self._root(), self.step]
        return max(moments, key=lambda parts: sum(parts.values()))

    def _start(self) -> Parts:
        """Embedding, head and the first layer are gathered."""
        return {**self.kept, "gathered weights": self.rank.gathering(), "activations": self.inputs}

    def _turn(self) -> Parts:
        """Between forward and backward pass embedding and head are gathered again."""
        again = self.shape.root * self.compute if self.rank.shards > 1 and self.rank.reshards else 0.0
        gathered, activations = self.rank.gathered(0) + again, self.kept_by_layers + self.inputs
        return {**self.kept, "gathered weights": gathered, "activations": activations, "logits": self.chunk}

    def _head(self) -> Parts:
        """A chunk's logits and their softmax, or its gradient of the weights, beside the sum of these in float32."""
        matrix = self.shape.matrix * self.trains_all
        softmax = (4.0 if self.entropies else 2.0) * self.chunk
        product = self.chunk * self.compute / 4 + (matrix * self.compute if self.compute < 4 else 0)
        activations, gathered = self.kept_by_layers + 2 * self.inputs, self.rank.gathered(1)
        logits = matrix * 4 + max(softmax, product)
        return {**self.kept, "gathered weights": gathered, "activations": activations, "logits": logits}

    def _layer(self) -> Parts:
        """The backward pass of the last layer, with the weights of the one before it on their way."""
        matrix, unit = self.shape.matrix * self.trains_all, self.shape.layer * self.trains_all
        flow = self.tokens * (2 * self.shape.width + 4 * self.shape.hidden + 2 * self.shape.copies) * self.compute
        return {
            **self.kept,
            "gathered weights": self.rank.gathered(3),
            "activations": self.kept_by_layers + self.recomputed + flow,
            "gradients of a layer": matrix * self.compute + self._reduced(unit, 0),
        }

    def _root(self) -> Parts:
        """Gradients of embedding and head: both computed, then reduced."""
        rank, matrix, root = self.rank, self.shape.matrix * self.trains_all, self.shape.root * self.trains_all
        # Not resharded, weights stay for the next micro-batch; in the first one there are no gradients of these yet.
        stays = max(0.0, rank.gathered(0) - root * rank.master / rank.shards)
        stays *= not (rank.reshards or self.whole)
        reduced = stays + self._reduced(root, 0 if self.shape.tied else matrix)
        computed = rank.gathered(0) + 2 * matrix * self.compute
        return {**self.kept, "gradients of embedding and head": max(computed, reduced)}

    def _reduced(self, numbers: int, last: int) -> float:
        """A unit's gradients, in float32, with what they are copied from, then with their shard and the last one."""
        source, shard = numbers * self.compute, numbers * 4.0 / self.rank.shards + last * self.compute
        return numbers * 4.0 + (0.0 if self.whole else max(source, shard))


def tokens_per_pass(config: RunConfig) -> int:
    """Tokens of the largest training pass on one rank: its budget, or the longest sequences laid out as configured."""
    actor = config.actor_rollout_ref.actor
    return pass_tokens(config, actor.ppo_micro_batch_size_per_gpu, actor.max_token_len)[0]


def pass_tokens(config: RunConfig, sequences: int, limit: int | None) -> tuple[int, int]:
    """All tokens, and response tokens, of the largest pass of so many sequences, or of so many tokens."""
    roles, data = config.actor_rollout_ref, config.data
    n, longest = roles.rollout.n, data.max_response_length
    if limit is not None:
        return limit, limit
    prompts = -(-sequences // n) if roles.shares_prompts else sequences
    return prompts * data.max_prompt_length + sequences * longest, sequences * longest
