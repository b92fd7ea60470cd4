"""vLLM's output layer held and multiplied in float32 beside other weights in another type: `head_dtype=fp32`.

With `head_dtype` in its `hf_overrides` vLLM multiplies in float32, but holds the layer's weight in the type of the
others, so that each sync would round it. These layers take the place of vLLM's, by its registry for that, and hold it
in float32. An embedding that shares the weight holds it too, and rounds the rows that it gives.

vLLM imports this module in each of its workers before it builds the model, as the module of their extension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from grpo_dist.engines.float32_products import float32_products
from grpo_dist.engines.vllm.weight_backend import WorkerExtension as WorkerExtension  # vLLM finds it here


def _of_head() -> dict[str, Any]:
    """Return the arguments of a layer with the output layer's weight, of the model that is being built."""
    model = get_current_vllm_config().model_config
    return {"params_dtype": torch.float32} if model is not None and model.head_dtype == torch.float32 else {}


@ParallelLMHead.register_oot
class Float32Head(ParallelLMHead):
    """The output layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | _of_head())


@VocabParallelEmbedding.register_oot
class Float32Embedding(VocabParallelEmbedding):
    """The embedding, whose rows have the type of the other layers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        model = get_current_vllm_config().model_config
        configs = () if model is None else (model.hf_config, model.hf_text_config)
        tied = any(getattr(config, "tie_word_embeddings", False) for config in configs)
        of_head = _of_head() if tied else {}
        super().__init__(*args, **kwargs | of_head)
        self.rows_dtype = torch.get_default_dtype() if of_head else None
        self.use_fused_embedding = self.use_fused_embedding and not of_head  # its kernel has not been read for float32

    def forward(self, input_: Tensor) -> Tensor:
        """Return the rows of token ids."""
        rows: Tensor = super().forward(input_)
        return rows if self.rows_dtype is None else rows.to(self.rows_dtype)


@LogitsProcessor.register_oot
class Float32Logits(LogitsProcessor):
    """The product of both; vLLM's own takes only a weight in the type of the hidden states to a GPU's tensor cores."""

    def _apply_head(self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None) -> Tensor:
        if self.head_dtype != torch.float32 or lm_head.weight.dtype != torch.float32:
            return super()._apply_head(lm_head, hidden_states, embedding_bias)
        with float32_products(hidden_states):
            return torch.nn.functional.linear(hidden_states.float(), lm_head.weight, embedding_bias)
