"""Sizes of a model, read from its config.json if that is available locally. Nothing is downloaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_dist.assets import BUILTIN, expanded, is_folder, resolve_model_path
from grpo_dist.assets.model_folder import count, text_config
from grpo_dist.errors import ConfigError

if TYPE_CHECKING:
    from grpo_dist.config.schema_roles import LoraSection

# Model types whose MLP has two matrices; that of the others has three, one of them a gate.
_UNGATED = {"gpt_neox", "phi", "starcoder2", "nemotron", "opt", "persimmon"}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
MLP_NAMES = ("gate_proj", "up_proj", "down_proj")
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True)
class ModelShape:
    """Number of parameters of a model, and the sizes that its memory depends on.

    Args:
        width: intermediate size of the MLP; with experts, that of one expert times the experts per token.
        copies: experts per token * hidden size, the dispatched hidden states of a token; 0 without experts.
        query_width: attention heads * head size.
        key_width: key-value heads * head size.
        layer: parameters of a decoder layer, which is one FSDP unit.
        matrix: parameters of the embedding: vocabulary * hidden size.
        output_layer: parameters of the output layer, also if it is the embedding; 0: the model has a small head.
        tied: whether embedding and output layer share their weights, or there is no output layer.
        linears: inputs + outputs of each linear layer, by its name in LoRA's target_modules; without experts.
        counted: parameters in the model's files; 0: unknown.
        vision: parameters of the vision part, which every rank and engine of a policy that sees images holds whole.
        recurrent: float32 numbers that a gated delta net keeps of a token for its backward pass, beside norms and MLP.
    """

    num_layers: int
    hidden: int
    width: int
    copies: int
    query_width: int
    key_width: int
    layer: int
    matrix: int
    output_layer: int
    vocabulary: int
    tied: bool
    linears: Mapping[str, int]
    counted: int = 0
    vision: int = 0
    recurrent: int = 0

    @property
    def root(self) -> int:
        """Parameters of the root FSDP unit: embedding, output layer and final norm."""
        return self.matrix * (1 if self.tied else 2) + self.hidden

    @property
    def num_parameters(self) -> int:
        """All parameters of the model; tied embeddings count once."""
        return self.counted or self.num_layers * self.layer + self.root

    def lora_parameters(self, model: LoraSection) -> int:
        """Number of parameters of the LoRA adapters."""
        chosen = self.linears if "all-linear" in model.target_modules else model.target_modules
        names = set(chosen) - set(model.exclude_modules or ())
        return self.num_layers * model.factors["r"] * sum(self.linears.get(name, 0) for name in names)


def model_shape(model_config: Mapping[str, Any], num_parameters: int = 0) -> ModelShape | None:
    """Sizes of a Llama-like decoder (grouped-query attention, gated or plain MLP, also experts); None for others.

    Args:
        num_parameters: in its weight files; 0: unknown.
    """
    text = text_config(model_config)
    needed = [count(text, name) for name in _SIZES]
    if not all(needed):
        return None
    hidden, layers, heads, width, vocabulary = needed
    head_dim = count(text, "head_dim") or hidden // heads
    query, key = heads * head_dim, (count(text, "num_key_value_heads") or heads) * head_dim
    experts = num_experts(text)
    expert_width = (count(text, "moe_intermediate_size") if experts else 0) or width
    chosen = (count(text, "num_experts_per_tok") or 1) if experts else 0
    attention, recurrent = 2 * hidden * (query + key), 0
    if (of_keys := count(text, "linear_key_head_dim")) and (of_values := count(text, "linear_value_head_dim")):
        nets, keys = count(text, "linear_num_value_heads"), count(text, "linear_num_key_heads") * of_keys
        attention = max(attention, hidden * (2 * keys + (3 * of_values + 2) * nets))
        # transformers' own function, measured: copies of queries, keys and values, and a state for each 64 tokens
        recurrent = nets * (24 * of_values + of_keys * of_values // 64)
    matrices = 2 if str(text.get("model_type")) in _UNGATED else 3
    expert, router = matrices * hidden * expert_width, hidden * experts
    return ModelShape(
        num_layers=layers,
        hidden=hidden,
        width=expert_width * max(1, chosen),
        copies=chosen * hidden,
        query_width=query,
        key_width=key,
        layer=attention + expert * max(1, experts) + router + 2 * hidden,
        matrix=vocabulary * hidden,
        output_layer=vocabulary * hidden,
        vocabulary=vocabulary,
        tied=bool(text.get("tie_word_embeddings", True)),  # the families that leave it out tie them
        linears={
            "q_proj": hidden + query,
            "k_proj": hidden + key,
            "v_proj": hidden + key,
            "o_proj": query + hidden,
            **dict.fromkeys(() if experts else MLP_NAMES, hidden + width),
        },
        counted=num_parameters if text is model_config else 0,  # a vision part does not train
        vision=_vision_parameters(model_config),
        recurrent=recurrent,
    )


def _vision_parameters(model_config: Mapping[str, Any]) -> int:
    """Parameters of a vision part's layers; 0 without one."""
    vision: Mapping[str, Any] = model_config.get("vision_config") or {}
    layers, hidden = count(vision, "num_hidden_layers") or count(vision, "depth"), count(vision, "hidden_size")
    return layers * hidden * (4 * hidden + 2 * (count(vision, "intermediate_size") or 4 * hidden))


def num_experts(text: Mapping[str, Any]) -> int:
    """Routed experts per layer, by config.json; 0 if the model has none."""
    number = next(filter(None, (count(text, name) for name in _EXPERTS)), 0)
    return number if number > 1 else 0


def model_config_at_hand(path: str) -> dict[str, Any] | None:
    """The model's config.json: from a built-in model, a local folder, the Hugging Face cache, or known_models.json.

    known_models.json holds only what `model_shape` needs, and ignores the owner in OWNER/NAME. None if not found.
    """
    try:
        folder = expanded(resolve_model_path(path) if path.startswith(BUILTIN) else path)
    except ConfigError:
        return None
    home, path = expanded(os.environ.get("HF_HOME", "~/.cache/huggingface")), path.partition("@")[0]
    cached = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{path.replace('/', '--')}" / "snapshots"
    snapshots = sorted(cached.iterdir()) if path.count("/") == 1 and is_folder(cached) else []
    for candidate in (folder, *snapshots):
        try:
            entries = json.loads((candidate / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(entries, dict):
            return entries
    known = json.loads(Path(__file__).with_name("known_models.json").read_text(encoding="utf-8"))
    return {name.rpartition("/")[2].lower(): entry for name, entry in known.items()}.get(Path(path).name.lower())
