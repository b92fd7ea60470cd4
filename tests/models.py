"""Small random models and batches for tests."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_dist.algorithms.settings import ObjectiveSettings
from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import ModelFolder
from grpo_dist.checks.models import check_files, checked_models
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_roles import AdamWConfig, LoraSection, OptimConfig
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.protocol import DataProto, Ragged
from tests.worker_settings import model_settings, objective_settings

VOCAB = 96
# Of a mixture of experts; vLLM pads the width of an expert on CPU.
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
EXPERTS |= {"norm_topk_prob": True}
# Of a hybrid model.
GATED_DELTA_NET = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
GATED_DELTA_NET |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def random_qwen3(folder: Path) -> str:
    """A random Qwen3 of 2 layers on disk."""
    return random_model("Qwen3", folder, head_dim=8)


def random_model(family: str, folder: Path, **changes: object) -> str:
    """A random model of 2 layers on disk, of a family of transformers: Llama, Qwen2, Qwen3, Gemma2, GPT2, ..."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "tie_word_embeddings": True, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**(sizes | changes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # the default init is so small that every distribution is uniform
        parameter.data.mul_(3.0)
    model.save_pretrained(folder)
    return str(folder)


def without_memory(config: Any) -> Any:
    """A causal LM of transformers on the meta device, with its own attention."""
    import transformers

    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def random_classifier(folder: Path, family: str = "Qwen3", kind: str = "Sequence", num_labels: int = 1) -> str:
    """A random sequence or token classifier on disk, whose head gives numbers that differ."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(random_model(family, folder))
    config.num_labels, config.pad_token_id = num_labels, 0
    torch.manual_seed(3)
    model = getattr(transformers, f"AutoModelFor{kind}Classification").from_config(config)
    torch.nn.init.normal_(model.score.weight)
    if model.score.bias is not None:
        torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(folder)
    return str(folder)


# A chat template unlike the built-in model's, for its tokenizer.
OTHER_TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}{{ eos_token }}"


def builtin_reward_model(folder: Path, template: str | None = OTHER_TEMPLATE) -> str:
    """The built-in model with a random head and one output, on disk; its tokenizer with a chat template of its own."""
    import transformers

    policy = resolve_model_path("builtin:tiny-qwen3")
    config = transformers.AutoConfig.from_pretrained(policy)
    config.num_labels = 1
    torch.manual_seed(3)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(policy, config=config)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return str(folder)


def another_builtin_model(folder: Path, **changes: object) -> str:
    """A random model of another size with the built-in model's tokens, on disk."""
    import transformers

    policy = resolve_model_path("builtin:tiny-qwen3")
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    sizes |= {"max_position_embeddings": 512}
    path = random_model("Qwen3", folder, **(sizes | changes))
    transformers.AutoTokenizer.from_pretrained(policy).save_pretrained(path)
    return path


def rebuilt_by_transformers(folder: Path) -> str:
    """The built-in model with a tokenizer class that transformers builds anew, with other tokens than its files say."""
    shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}))
    return str(folder)


def add_tokenizer(folder: str) -> str:
    """The folder of a model, with the built-in model's tokenizer in it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve_model_path("builtin:tiny-qwen3"), name), folder)
    return folder


def random_batch(num_groups: int, n: int, seed: int = 0) -> DataProto:
    """Groups of ragged responses with every column an update needs."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, VOCAB, rng.integers(3, 9)) for _ in range(num_groups)]
    responses = [rng.integers(3, VOCAB, rng.integers(1, 12)) for _ in range(num_groups * n)]
    noise = [rng.normal(size=len(r)).astype(np.float32) for r in responses]
    return DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([p for p in prompts for _ in range(n)], torch.int32),
            "responses": Ragged.from_rows(responses, torch.int32),
            "response_mask": Ragged.from_rows([np.ones(len(r)) for r in responses], torch.int8),
            "old_log_probs": Ragged.from_rows([-4.5 + 0.1 * x for x in noise], torch.float32),
            "ref_log_probs": Ragged.from_rows([-4.5 + 0.2 * x for x in noise], torch.float32),
            "advantages": Ragged.from_rows([np.full(len(x), x[0]) for x in noise], torch.float32),
        },
        {"uid": [f"p{i // n}" for i in range(num_groups * n)]},
    )


def branching_batch(num_groups: int, n: int, seed: int = 0) -> DataProto:
    """`random_batch` with responses of several runs: each goes on from anywhere before it, or begins anew."""
    rng, data = np.random.default_rng(seed), random_batch(num_groups, n, seed)
    prompts, parts, rows = data["prompts"].lengths.tolist(), [rng.integers(3, VOCAB, 18) for _ in data["uid"]], []
    for length in prompts:
        follows = np.arange(-1, 17)
        for start in rng.choice(np.arange(1, 18), 5, replace=False):
            follows[start] = rng.integers(-length - 1, start)
        rows.append(follows)
    masks = [(rng.random(18) < 0.7) & (row != -length - 1) for row, length in zip(rows, prompts, strict=True)]
    noise = [rng.normal(size=18) for _ in rows]
    floats = {"old_log_probs": -4.5, "ref_log_probs": -4.4, "rollout_log_probs": -4.5, "advantages": 0.0}
    columns: dict[str, Any] = {
        "prompts": data["prompts"],
        "responses": Ragged.from_rows(parts, torch.int32),
        "response_mask": Ragged.from_rows(masks, torch.int8),
        "predecessors": Ragged.from_rows(rows, torch.int32),
        **{name: Ragged.from_rows([base + 0.1 * x for x in noise], torch.float32) for name, base in floats.items()},
    }
    return DataProto.from_dict(columns, {"uid": data["uid"]})


def objective(**changes: object) -> ObjectiveSettings:
    """GRPO's default objective, with changes."""
    settings = {"use_kl_loss": True, "kl_loss_type": "k3", "kl_loss_coef": 0.1, "entropy_coeff": 0.01}
    return objective_settings(**(settings | changes))


def scheduled(*, warmup: int = 2, lr: float = 1e-2, **changes: object) -> OptimConfig:
    """AdamW with a warm-up of so many steps, and a cosine down to a tenth."""
    values = {"optimizer": "AdamW", "lr": lr, "weight_decay": 0.01, "betas": (0.9, 0.999), "min_lr_ratio": 0.1}
    values |= {"lr_warmup_steps": warmup, "lr_warmup_steps_ratio": 0.0, "lr_scheduler_type": "cosine"}
    values |= {"override_optimizer_config": None}
    return OptimConfig(**(values | changes))  # type: ignore[arg-type]


def trainable_engine(
    path: str,
    *,
    lr: float = 1e-2,
    temperature: float = 0.7,
    layout: str = "shared",
    dtype: str = "fp32",
    lora: LoraSection | None = None,
    gradient_checkpointing: bool = False,
    reshard: bool = True,
    **sharding: Any,
) -> FSDPEngine:
    """A CPU engine with AdamW; more are keys of `fsdp_config`."""
    changes = {"enable_gradient_checkpointing": gradient_checkpointing, "reshard_after_forward": reshard, **sharding}
    model = model_settings(path, lora=lora, compute_dtype=dtype, layout=layout, **changes)
    optimizer = AdamWConfig(lr=lr, weight_decay=0.01, betas=(0.9, 0.999), override_optimizer_config=None)
    return FSDPEngine(model, device="cpu", temperature=temperature, optimizer=optimizer, grad_clip=1.0)


def policy_folder(config: RunConfig) -> ModelFolder:
    """Return the checked folder of a run's policy."""
    return check_files(checked_models(config)[0])
