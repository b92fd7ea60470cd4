"""docs/models.md: every causal LM of transformers that vLLM knows, and in which layouts it trains as its own code says.

Each family is built with a few small random layers, and goes through the checks before a run and a train engine.

python -m scripts.architectures > docs/models.md        (several minutes)
python -m scripts.architectures FAMILY ...              these families alone
"""

from __future__ import annotations

import multiprocessing
import queue
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo_dist.algorithms.settings import SFTSettings
from grpo_dist.assets import resolve_model_path
from grpo_dist.checks.models import check_files, check_use, checked_models
from grpo_dist.config.schema_roles import AdamWConfig
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plan.commands import load_config
from grpo_dist.protocol import DataProto, Ragged

LAYOUTS = {"padded": "padded sequences", "packed": "packed sequences", "shared": "shared prompts"}
_PAGE = """# Models

Made by `python -m scripts.architectures` with transformers {version}: each causal LM of transformers that vLLM has too,
by its `model_type`, as a small random model on CPU. Its log-probs and its gradient are compared with the model's own
code (eager attention, one sequence at a time, float32), its buffers with those that `from_pretrained` gives. None
differs. The same is asked of any model before its first step: where a layout gives other log-probs than the model's own
code, the run takes padded sequences with the model's own attention, and says so; a model whose own code fails, or whose
tokens see later ones, ends the run with its name.

| Layouts | Why | `model_type` |
|---|---|---|
| padded, packed and shared prompts | | {everywhere} |
{rest}

## Hybrid models

Gated delta nets (Qwen3.5, Qwen3-Next, Olmo Hybrid) train in all three layouts, as exactly as attention: each segment of
a packed row begins with the state, and the last inputs of the convolution, behind what it follows. So a prompt is
computed once for its responses, also where they branch. Ulysses refuses them. On GPUs transformers takes the kernels of
flash-linear-attention and causal-conv1d where these are installed; that was not run.

vLLM's engine on CPU samples Qwen3.5 in bf16 alone (`actor_rollout_ref.rollout.dtype=bfloat16`), without the prefix
cache, and needs torchvision. Run by hand with it: a whole rehearsal; log-probs differ from the trainer's by 0.3 of what
bf16 explains. Not on CPU: Qwen3-Next, whose log-probs there are nan, and Olmo Hybrid (`triton.set_allocator`).

## With a vision part

Of a model with a vision or audio part the language part trains: on rows of text, and of some families on
rows with [images](vision.md) too. The exported folder has all that the folder had: tensors that do not train as they
were, config.json, class and processors; LoRA's adapters name the modules of the whole model. For rows of text engines
start on the language part alone (`language_model_only`).

| Family | Export: all tensors, config, reload; adapters | Engine: log-probs, new weights, adapters |
|---|---|---|
| Idefics3, SmolVLM | `make test`, `make test-deep` | `make test-deep` |
| Gemma 3, Gemma 4, Mistral 3 | `make test`, `make test-deep` | log-probs by hand; vLLM's class needs torchvision |
| Qwen3.5 | `make test`, `make test-deep` | a rehearsal by hand, in bf16; vLLM's class needs torchvision |

Qwen2.5-VL and Qwen3-VL have no causal LM of the language part in transformers; here it is made of their backbone.
Refused by name, since there is none: Qwen2-VL, GLM-4V, Llama 3.2 Vision and others.

## Rehearsed

`grpo-dist rehearse` ([how](rehearsal.md)) runs these whole in `make test-long`, the two in bold letters in
`make test-deep`: a model of their architecture with random weights, three steps, a driver that is killed, a resume, the
export, and its reload by transformers and vLLM.

| What | Model, shrunk from |
|---|---|
| all of `grpo_dist/config/recipe`: **`ppo`**, ... | the built-in model |
| **`examples/run_qwen3-8b.sh`** | Qwen3-8B's config.json |
| `examples/run_mistral13b_skyworkrm_hhrlhf.sh`, `run_smollm2_cpu.sh` | the same |
| `examples/calculator`, `custom_reward`, `instructions`, `tools` | the same |
| `examples/openai_agent`, `examples/planner` (GRPO) | the same |
"""
VOCABULARY, LIMIT_S = 256, 240.0
# Largest difference of a log-prob, in nats, and of the gradient, of its size, that rounding explains.
VALUE, GRADIENT = 1e-3, 1e-3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
}
_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
_WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_ALL_WINDOWED = {"sliding_window": 8}
_WINDOWED = (
    "afmoe cohere2 cohere2_moe cwm exaone4 exaone_moe gemma2 gemma3_text gpt_oss granite_swa granitemoe_swa laguna "
    "mellum mimo_v2_flash olmo3 vaultgemma"
)
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
_MAMBA |= {"mamba_chunk_size": 32}
SMALL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3"), _LATENT
    ),
    **dict.fromkeys(_WINDOWED.split(), _WINDOW),
    **dict.fromkeys(("qwen2", "qwen3"), _WINDOW | {"use_sliding_window": True}),
    **dict.fromkeys(("mistral", "ministral3", "mixtral", "phi3", "starcoder2"), _ALL_WINDOWED),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text"), _LINEAR),
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "falcon": {"head_dim": None},
    "falcon_h1": _MAMBA | {"ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3]},
    "gemma3n_text": _WINDOW | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY},
    "gemma4_text": _WINDOW | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": _LINEAR | _MAMBA | {"mamba_d_head": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_dt_rank": 4},
    "kimi_linear": _LINEAR | _LATENT,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {"intermediate_size_mlp": 96, "attention_chunk_size": 8},
    "longcat_flash": _LATENT | {"num_layers": 1, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 48, "moe_topk": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 32},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 32},
    "olmo_hybrid": _LINEAR,
    "qwen4_exp_text": _LINEAR
    | {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "mamba_d_state": 16,
        "chunk_size": 32,
    },
}


def families() -> list[str]:
    """The model types of transformers whose causal LM vLLM knows, one for each class."""
    from vllm.model_executor.models import registry

    known = {*registry._TEXT_GENERATION_MODELS, *registry._TRANSFORMERS_SUPPORTED_MODELS}
    of_class: dict[str, str] = {}
    for family, kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        name = kind if isinstance(kind, str) else kind[0]
        if name in known and (name not in of_class or family.endswith("_text") or "-" in of_class[name]):
            of_class[name] = family
    return sorted(of_class.values())


def save_small(family: str, folder: str) -> None:
    """Write a small random model whose every weight counts: sinks, norms and biases too."""
    config = transformers.AutoConfig.for_model(family, **_sizes(family))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    random = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "A_log" in name or "dt_bias" in name:  # of state space models, which decay by them
            continue
        noise = torch.randn(weight.shape, generator=random)
        weight.data = noise * 0.15 if weight.dim() > 1 else weight.data + noise * (1.0 if "sink" in name else 0.1)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(resolve_model_path("builtin:tiny-qwen3")).save_pretrained(folder)


def _sizes(family: str) -> dict[str, Any]:
    return {name: size for name, size in (SIZES | SMALL.get(family, {})).items() if size is not None}


def sequences() -> DataProto:
    """Two prompts with two responses each, longer than the windows and chunks of the models."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, size) for size in (24, 24, 9, 9)]
    responses = [rng.integers(3, VOCABULARY, size) for size in (40, 31, 40, 5)]
    columns = {"prompts": prompts, "responses": responses}
    made = {name: Ragged.from_rows(rows, torch.int32) for name, rows in columns.items()}
    made["response_mask"] = Ragged.from_rows([np.ones(len(row)) for row in responses], torch.int8)
    return DataProto.from_dict(made, {"uid": ["a", "a", "b", "b"]})


def judge(family: str, layouts: Iterable[str] = LAYOUTS) -> list[str]:
    """What becomes of a family in each layout: "right", "padded: why", "refused: why", or "WRONG: what".

    For a process group of one rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        save_small(family, folder)
        own = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        expected = by_its_own_code(own)
        return [_judged(folder, own, expected, layout) for layout in layouts]


def by_its_own_code(own: Any) -> Tensor:
    """Log-probs of the response tokens, one sequence at a time; the model is left with the gradient of SFT's loss."""
    data, found = sequences(), []
    for prompt, response in zip(data["prompts"].rows(), data["responses"].rows(), strict=True):
        ids = torch.cat([prompt, response]).long().unsqueeze(0)
        log_probs = torch.log_softmax(own(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float(), -1)
        found.append(log_probs.gather(1, response.long().unsqueeze(1)).squeeze(1))
    values = torch.cat(found)
    (-values.mean()).backward()
    return values.detach()


def _judged(folder: str, own: Any, expected: Tensor, layout: str) -> str:
    config = load_config([f"actor_rollout_ref.model.path={folder}"])[0]
    optimizer = AdamWConfig(lr=1e-3, weight_decay=0.0, betas=(0.9, 0.999), override_optimizer_config=None)
    data = sequences()
    try:
        row = checked_models(config)[0]
        check_use(row, check_files(row))  # as before a run
        settings = replace(row.settings, layout=layout, model_dtype="fp32", compute_dtype="fp32")
        engine = FSDPEngine(settings, device="cpu", temperature=1.0, optimizer=optimizer)
        values = engine.compute_log_probs(data, PassLimits("", 4)).values
        found = torch.nn.utils.parameters_to_vector(engine.gradient(data, SFTSettings(), PassLimits("", 4)))
    except (ConfigError, DataError) as error:
        return f"refused: {str(error).replace(settings.setting, '')}"
    gradient = torch.nn.utils.parameters_to_vector(p.grad for p in own.parameters() if p.grad is not None)
    buffers = dict(engine.model.named_buffers())
    off = float((values - expected).abs().max())
    gradient_off = float((found - gradient).norm() / gradient.norm())
    others = [name for name, buffer in own.named_buffers() if not torch.equal(buffer, buffers[name])]
    if others or not (off < VALUE and gradient_off < GRADIENT):
        return f"WRONG: {off:.1e} nats, {gradient_off:.1e} of the gradient, other buffers: {others}"
    if engine.forward.report.startswith(LAYOUTS[layout]):
        return "right"
    told = re.search(r"\((.*?)(; the chunked output layer.*)?\); checked", engine.forward.report)
    why = told[1] if told else ""
    return f"padded: {'found by the comparison before the first step' if LAYOUTS[layout] in why else why}"


def _child(family: str, told: Any) -> None:
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
            told.put(judge(family))
    except BaseException as error:  # noqa: BLE001 - of a model's code, of any kind
        told.put([f"WRONG: {type(error).__name__}: {error}"])


def rows(names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Each family with its cells, judged in a process of its own."""
    context = multiprocessing.get_context("fork")
    for family in names:
        told = context.Queue()
        process = context.Process(target=_child, args=(family, told))
        process.start()
        try:
            yield family, told.get(timeout=LIMIT_S)
        except queue.Empty:
            yield family, ["WRONG: no answer"]
        finally:
            process.kill()


def page(table: Iterable[tuple[str, list[str]]]) -> str:
    """The text of docs/models.md.

    Raises:
        SystemExit: families are wrong, and nothing would say so.
    """
    everywhere: list[str] = []
    wrong: list[str] = []
    others: dict[tuple[str, str], list[str]] = {}
    for family, cells in table:
        print(family, *cells, sep="  ", file=sys.stderr, flush=True)
        if any(cell.startswith("WRONG") for cell in cells):
            wrong.append(f"{family}: {cells}")
        elif set(cells) == {"right"}:
            everywhere.append(family)
        else:
            does, _, why = max(cells, key=len).partition(": ")
            others.setdefault((does, why), []).append(family)
    if wrong:
        raise SystemExit("\n".join(wrong))
    rest = [f"| {does} | {why} | {_listed(names)} |" for (does, why), names in sorted(others.items(), reverse=True)]
    return _PAGE.format(version=transformers.__version__, everywhere=_listed(everywhere), rest="\n".join(rest))


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(page(rows(sys.argv[1:] or families())), end="")
