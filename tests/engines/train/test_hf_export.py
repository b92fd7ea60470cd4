"""The exported model is there whole or not at all, file by file. What a policy holds: test_checkpoint.py."""

from __future__ import annotations

import functools
import json
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from grpo_dist.config.schema_roles import LoraSection
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import hf_export
from tests.disks import MIB, small_disk
from tests.engines.train.plain import told, weights
from tests.engines.train.test_lora import trained
from tests.engines.train.test_model_loading import DEEPSEEK
from tests.messages import says
from tests.models import add_tokenizer, objective, random_batch, random_model, trainable_engine
from tests.ranks import run_ranks
from tests.tiers import first
from tests.worker_settings import lora


def export_twice(rank: int, model: str, folder: Path) -> str:
    """Once as it should be; then in files of 30 kB where none may grow beyond 20: the first is refused on the way."""
    engine = trainable_engine(model)
    engine.export_hf_model(folder, "fp32")
    hf_export.EXPORT_FILE_BYTES = 30_000
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    return told(engine.export_hf_model, folder, "fp32")


@pytest.mark.deep
def test_a_full_disk_leaves_the_one_before_and_all_ranks_say_so(random_models: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "huggingface"
    for error in run_ranks(2, export_twice, random_models["tied"], folder):
        says(error, "CheckpointError", "write", folder, "trainer.default_local_dir")
    assert (folder / "model.safetensors").stat().st_size > 20_000
    assert {path.name for path in folder.iterdir()} >= {"config.json", "generation_config.json", "tokenizer.json"}
    assert list(tmp_path.iterdir()) == [folder], "nothing half written is left"
    (neighbour := tmp_path / "metrics.jsonl").touch()
    assert {path.stat().st_mode for path in folder.iterdir()} == {neighbour.stat().st_mode}, "weights too"


def export_without_room(rank: int, model: str, folder: Path) -> tuple[str, list[str]]:
    """The error of an export to a disk that is too small, and what there is then."""
    error = told(trainable_engine(model).export_hf_model, folder / "huggingface", "fp32")
    torch.distributed.barrier()
    return error, [path.name for path in folder.iterdir()]


def test_the_disk_is_asked_for_the_whole_model_first(random_models: dict[str, str], tmp_path: Path) -> None:
    """It has room for config and tokenizer, and for two of three parts of the weights."""
    size = sum(weight.nbytes for weight in load_file(Path(random_models["untied"], "model.safetensors")).values())
    with small_disk(tmp_path / "disk", mib=1) as disk:
        (disk / "filler").write_bytes(bytes(MIB - size * 2 // 3))
        for error, left in run_ranks(2, export_without_room, random_models["untied"], disk):
            says(error, f"{disk}/huggingface", f"{size / 2**30:.3g} GiB", "trainer.default_local_dir")
            assert left == ["filler"]


def export(rank: int, model: str, folder: Path, lora: LoraSection | None) -> dict[str, Any]:
    """A trained policy in small files, in both types."""
    hf_export.EXPORT_FILE_BYTES = 20_000
    engine = trainable_engine(model, lora=lora)
    ranks = torch.distributed.get_world_size()
    rows = random_batch(num_groups=2, n=2).index(np.arange(4)[rank::ranks])
    engine.train_mini_batch(rows, objective(), PassLimits("", 1))
    for dtype in ("fp32", "bf16"):
        engine.export_hf_model(folder / dtype, dtype)
    return weights(engine)


EXPERTS = DEEPSEEK | {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_key_value_heads": 4}
CASES: dict[str, tuple[str, dict[str, Any], LoraSection | None]] = {
    "dense": ("Llama", {"tie_word_embeddings": False}, None),
    # merged weights, some of them transposed
    "lora": ("GPT2", {}, lora()),
    # experts that transformers holds stacked are apart again, and buffers of the files are there
    "experts": ("DeepseekV3", EXPERTS, None),
}


@pytest.mark.parametrize("case", first(CASES, "dense"))
def test_the_files_have_the_names_of_the_model_that_was_loaded(case: str, tmp_path: Path) -> None:
    family, changes, lora = CASES[case]
    source = add_tokenizer(random_model(family, tmp_path / "source", **changes))
    named = Path(source, "tokenizer_config.json")  # a class that transformers would build anew
    named.write_text(json.dumps(json.loads(named.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}))
    taught, _ = run_ranks(2, export, source, tmp_path, lora)
    names = set(load_file(Path(source, "model.safetensors")))
    fresh = dict(transformers.AutoModelForCausalLM.from_pretrained(source).named_parameters())
    assert any((taught[name] != fresh[name].detach().numpy()).any() for name in fresh), "it has been trained"
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        folder = tmp_path / dtype
        written, read = (json.loads(Path(place, "tokenizer.json").read_text()) for place in (folder, source))
        assert written == read
        held = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
        sizes = [[tensor.nbytes for tensor in tensors.values()] for tensors in held.values()]
        assert list(held) == [f"model-{i + 1:05}-of-{len(held):05}.safetensors" for i in range(len(held))]
        assert all(len(each) == 1 or sum(each) <= 20_000 for each in sizes)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for file, tensors in held.items() for name in tensors}
        assert index["metadata"]["total_size"] == sum(map(sum, sizes))
        assert set(index["weight_map"]) == names
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.dtype == kind
        assert model.config.tie_word_embeddings == ("lm_head.weight" not in names)
        assert transformers.GenerationConfig.from_pretrained(folder).eos_token_id == 2
        assert dict(model.named_parameters()).keys() == taught.keys()
        for name, weight in model.named_parameters():
            assert torch.equal(weight, torch.from_numpy(taught[name]).to(kind)), name


# --- reward models: tests/e2e/test_reward_model_run.py --------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "padding", "template", "expected"),
    [
        (None, (5, "<pad>"), None, 5),
        (None, (5, "<pad>"), "{{ eos_token }}", 5),
        (None, (2, "</s>"), None, None),  # conversations end in it: the end of sequence
        (None, (5, "<pad>"), "{{ messages[0].content }}<pad>", None),
        (None, (5, "<pad>"), "{{ messages[0].content + pad_token }}", None),
        (None, (None, None), None, None),
        (2, (5, "<pad>"), None, 2),  # trained where transformers reads it, in front of the end
        (2, (2, "</s>"), None, 2),
        (7, (5, "<pad>"), "<pad>", 7),
    ],
)
def test_transformers_reads_the_score_where_the_model_was_trained(
    named: int | None,
    padding: tuple[int | None, str | None],
    template: str | None,
    expected: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By the padding token that config.json had in training; another is named where no conversation ends in it."""
    config = SimpleNamespace(pad_token_id=named)
    names = {"pad_token_id": padding[0], "pad_token": padding[1], "eos_token_id": 2, "chat_template": template}
    hf_export._set_padding(config, SimpleNamespace(**names))
    assert config.pad_token_id == expected
    if warned := named is None and padding[0] is not None and expected is None:
        says(caplog.text, f"pad_token_id={padding[0]}")
    assert bool(caplog.text) == warned


# --- adapters --------------------------------------------------------------------------------------------------------
LORA = lora()
ADAPTER = "lora_adapter"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 23).reshape(2, 10)).logits


@pytest.fixture
def model(request: pytest.FixtureRequest, random_models: dict[str, str], tmp_path: Path) -> str:
    if request.param == "GPT2":  # Conv1D: transposed weights
        return add_tokenizer(random_model("GPT2", tmp_path / "source"))
    return random_models[request.param]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("model", "lora"),
    [
        ("tied", LORA),
        ("experts", LORA.replaced(path="owner/name@v1")),
        ("GPT2", LORA.replaced(target_modules=("c_attn", "h.0.mlp.c_fc"))),  # c_fc of one layer only
    ],
    indirect=["model"],
)
def test_peft_computes_what_the_merged_model_does(model: str, lora: LoraSection, tmp_path: Path) -> None:
    import peft

    run_ranks(2, functools.partial(trained, steps=2), model, lora, tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    untrained = logits(base)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / ADAPTER)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    torch.testing.assert_close(logits(adapted), logits(merged), rtol=1e-4, atol=1e-4)
    assert (logits(adapted) - untrained).abs().max() > 1e-2, "the factors have been trained"

    config = json.loads((tmp_path / ADAPTER / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"], config["task_type"]) == (4, 8, "none", "CAUSAL_LM")
    of_hub = lora.path == "owner/name@v1"
    assert config["base_model_name_or_path"] == ("owner/name" if of_hub else model)
    assert config["revision"] == ("v1" if of_hub else None)
    targets = set(config["target_modules"])
    if lora.targets == "all-linear":
        assert "q_proj" in targets
        assert not any("." in name for name in targets)
    else:
        assert targets == {"transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn", "transformer.h.0.mlp.c_fc"}
        assert config["fan_in_fan_out"]
    adapted.save_pretrained(str(tmp_path / "by peft"))
    ours, by_peft = (load_file(tmp_path / name / "adapter_model.safetensors") for name in (ADAPTER, "by peft"))
    assert ours.keys() == by_peft.keys()
    assert all(torch.equal(ours[name], by_peft[name]) for name in ours)


@pytest.mark.deep
@pytest.mark.parametrize("model", ["tied", "GPT2"], indirect=True)
def test_training_goes_on_from_an_adapter(model: str, tmp_path: Path) -> None:
    train = functools.partial(trained, steps=2)
    (fresh,) = run_ranks(1, train, model, LORA, tmp_path / "first")
    again = LORA.replaced(lora_adapter_path=str(tmp_path / "first" / ADAPTER))
    (one,) = run_ranks(1, train, model, again)
    two, _ = run_ranks(2, train, model, again)
    for found in (one, two):
        np.testing.assert_allclose(found["before"], fresh["after"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found["reference"], fresh["before"], rtol=1e-5, atol=1e-5)
        assert np.abs(found["after"] - found["before"]).max() > 1e-3
    np.testing.assert_allclose(one["after"], two["after"], rtol=1e-4, atol=1e-4)


def load(rank: int, path: str, adapter: str) -> str:
    return told(trainable_engine, path, lora=LORA.replaced(lora_adapter_path=adapter))


@pytest.mark.deep
def test_an_adapter_that_does_not_fit_is_refused_on_every_rank(random_models: dict[str, str], tmp_path: Path) -> None:
    run_ranks(1, functools.partial(trained, steps=0), random_models["tied"], LORA, tmp_path)
    good = tmp_path / ADAPTER
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors = load_file(good / "adapter_model.safetensors")
    cases = {
        "nan": ({name: tensors[name] * torch.nan}, [name, "nan"]),
        "shape": ({name: torch.zeros(4, 5)}, [name, "(4, 5)", "base model"]),
        "module": (
            {f"base_model.model.model.layers.9.mlp.up_proj.lora_{k}.weight": torch.zeros(4, 4) for k in "AB"},
            ["model.layers.9.mlp.up_proj"],
        ),
    }
    for case, (changes, parts) in cases.items():
        folder = Path(shutil.copytree(good, tmp_path / case))
        save_file(tensors | changes, folder / "adapter_model.safetensors")
        for message in run_ranks(2, load, random_models["tied"], str(folder)):
            says(message, f"actor_rollout_ref.model.lora_adapter_path={folder}", *parts)
