"""Rotary embeddings whose factors depend on how long sequences are."""

from __future__ import annotations

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def hold_longrope_factors(model: Any, max_model_len: int) -> None:
    """Fix LongRoPE's factors (Phi-3; arXiv 2402.13753) for the longest sequence that the run may have.

    transformers takes the long factors for a whole micro-batch as soon as one of its positions is beyond the original
    length, so that a sequence's log-probs would depend on its company. vLLM takes them for all sequences if its
    `max_model_len` is beyond it, and so does this: trainer and sampler are the same model.

    Args:
        model: a loaded causal LM; left as it is if it has no such embedding.
        max_model_len: most tokens of prompt and response.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) != "longrope":
            continue
        factors, scaling = ROPE_INIT_FUNCTIONS["longrope"](module.config, module.inv_freq.device, max_model_len)
        module.inv_freq, module.attention_scaling = factors, scaling
        module.rope_type = "default"  # its forward pass now leaves the factors alone
