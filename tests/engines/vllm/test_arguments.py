"""What vLLM's own config makes of a run's settings on GPUs. There is none here: vLLM is told that there are."""

import gzip
import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.auto import tokenization_auto

from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import load_tokenizer
from grpo_dist.config.schema_roles import LoraSyncConfig
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm import arguments
from grpo_dist.engines.vllm.arguments import (
    adapter_args,
    clear_traces,
    engine_args,
    recording_args,
    take_traces,
    tokenizer_args,
)
from grpo_dist.engines.vllm.starting import quiet_environment
from grpo_dist.errors import ConfigError, EngineError
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.sizes import engine_lora_rank
from tests import golden
from tests.engines.vllm.faked_gpu import BY_KERNELS, REFUSED, RUNS, every_row
from tests.engines.vllm.real import PROMPTS, generate, sampling
from tests.messages import refuses, says
from tests.models import random_model
from tests.plan.asked import load, overrides, refused
from tests.worker_settings import changed, engine_settings

FOLDER = Path(golden.__file__).parent
GOLDEN = json.loads((FOLDER / "vllm_on_gpus.json").read_text())  # of vLLM's build for GPUs
RESOLVED = {name: GOLDEN["runs"]["eight"] | differing for name, differing in GOLDEN["runs"].items()}


@pytest.mark.deep
def test_the_build_for_cpu_told_of_gpus_says_what_theirs_has_said(tmp_path: Path) -> None:
    """But for what vLLM asks its kernels: there the golden rows stand alone."""
    file = tmp_path / "rows.pickle"
    file.write_bytes(pickle.dumps({name: row for name, row in every_row().items() if name not in BY_KERNELS}))
    command = [sys.executable, "-m", "tests.engines.vllm.faked_gpu", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (RESOLVED.keys(), GOLDEN["refused"].keys()) == (RUNS.keys(), REFUSED.keys())
    rows = {name: row for name, row in (RESOLVED | GOLDEN["refused"]).items() if name not in BY_KERNELS}
    assert json.loads(done.stdout.splitlines()[-1]) == rows
    pins = dict(line.split("==") for line in (FOLDER.parents[1] / "constraints/gpu.txt").read_text().splitlines())
    assert GOLDEN["versions"] == {name: pins[name] for name in GOLDEN["versions"]}, "scripts/cuda_engine_config.py"


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_refuses_on_gpus_is_refused_before_it_starts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _, asked = REFUSED[name]
    load(RUNS[run])
    if variable := asked.startswith("VLLM_"):
        monkeypatch.setenv(*asked.split("="))
    says(refused(RUNS[run], "" if variable else asked), *overrides(asked))


def test_the_users_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    quiet_environment("cuda")
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ
    quiet_environment("cpu")
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def of_lora(path: str, **changes: Any) -> EngineSettings:
    return engine_settings(path, **({"lora_rank": 4, "lora_alpha": 8.0, "lora": LoraSyncConfig(merge=False)} | changes))


def test_only_layers_with_factors_get_room(random_models: dict[str, str], tmp_path: Path) -> None:
    attention, dense = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    tiny = resolve_model_path("builtin:tiny-qwen3")
    for path, layers in ((tiny, attention | dense), (random_models["experts"], attention)):
        found = adapter_args(of_lora(path))
        assert set(found.pop("lora_target_modules")) == layers
        assert found == {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    some = adapter_args(of_lora(tiny, lora_rank=16, target_modules=("v_proj", "layers.0.mlp.up_proj")))
    assert (some["lora_target_modules"], some["max_lora_rank"]) == (["up_proj", "v_proj"], 16)
    assert adapter_args(engine_settings(tiny)) == {}
    assert [engine_lora_rank(rank) for rank in (1, 2, 32, 33, 512)] == [1, 8, 32, 64, 512]
    with refuses(ConfigError, "actor_rollout_ref.model.lora.merge=false", "GPT2LMHeadModel", "merge=true"):
        adapter_args(of_lora(random_model("GPT2", tmp_path)))


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "knows_internals", lambda: False)
    with refuses(ConfigError, "actor_rollout_ref.actor.router_replay.mode=R3", "0.32."):
        recording_args("cpu")
    assert recording_args("cuda") == {"enable_return_routed_experts": True}, "which says itself what it needs"


TEXT = "She had 1234 and 100 apples;  it's 16-12.\n\tÉtienne's <|end|> Ⅳ ﬁ 両"
CORPUS = ["12 123 1234 16 100 1000 she had apples it's Étienne's"] * 50
SPECIAL: dict[str, Any] = {"special_tokens": ["<|end|>", "<s>", "<unk>"], "show_progress": False}
CLASSES = sorted({name for name in tokenization_auto.TOKENIZER_MAPPING_NAMES.values() if name} | {"LlamaTokenizerFast"})


def byte_level() -> Tokenizer:
    """SmolLM2's form: digits apart."""
    tokenizer, level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, **SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """A unigram model with a normalizer, which marks the beginning of a word."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", **SPECIAL))
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, sentence_pieces])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param.__name__)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=request.param(), eos_token="<|end|>", bos_token="<s>", unk_token="<unk>"
    )
    made.chat_template = "{% for m in messages %}<s>{{ m.content }}<|end|>{% endfor %}"
    made.save_pretrained(path)
    return path


def called(folder: Path, model_type: str, tokenizer_class: str, **more: Any) -> EngineSettings:
    """The settings of an engine on a model of this type, whose tokenizer has this class by name."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    saved = json.loads((folder / "tokenizer_config.json").read_text())
    saved.pop("auto_map", None)
    (folder / "tokenizer_config.json").write_text(json.dumps({**saved, "tokenizer_class": tokenizer_class, **more}))
    return engine_settings(str(folder), max_num_batched_tokens=1024, seed=3, needs_tokenizer=True)


def of_vllm(arguments: Any) -> Any:
    quiet_environment("cpu")
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(arguments["tokenizer"], tokenizer_mode=arguments["tokenizer_mode"], trust_remote_code=False)


@pytest.mark.deep
def test_vllms_tokens_are_those_of_training(folder: Path, tmp_path: Path) -> None:
    differing, conversation = 0, [{"role": "user", "content": TEXT}]
    names = [("llama", name) for name in CLASSES]
    names += [(kind, "GPT2Tokenizer") for kind in ("qwen2", "phi3", "deepseek_v3", "mistral", "gemma3")]
    for number, (model_type, name) in enumerate(names):
        settings = called(folder, model_type, name)
        mine = load_tokenizer(str(folder), trust_remote_code=False)
        theirs = of_vllm(tokenizer_args(settings, str(tmp_path / str(number))))
        ids = mine(TEXT)["input_ids"]
        assert theirs(TEXT)["input_ids"] == ids, name
        assert theirs.decode(ids) == mine.decode(ids), name
        told = [each.apply_chat_template(conversation, return_dict=False) for each in (mine, theirs)]
        assert told[0] == told[1], name
        try:
            differing += transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"] != ids
        except Exception:
            differing += 1
    assert differing > 10, "without that the tokens would have been others"


def test_trusted_code_counts_only_where_the_tokenizer_has_some(folder: Path, tmp_path: Path) -> None:
    settings = changed(called(folder, "llama", "GPT2Tokenizer"), trust_remote_code=True)
    mine, trusting = (load_tokenizer(str(folder), trust_remote_code=trust) for trust in (False, True))
    assert trusting(TEXT)["input_ids"] == mine(TEXT)["input_ids"]
    assert of_vllm(tokenizer_args(settings, str(tmp_path / "a")))(TEXT)["input_ids"] == mine(TEXT)["input_ids"]
    called(folder, "llama", "GPT2Tokenizer", auto_map={"AutoTokenizer": [None, "own.Own"]})
    assert tokenizer_args(settings, str(tmp_path / "b")) == {}, "vLLM runs the code as transformers does"
    assert "tokenizer" in tokenizer_args(changed(settings, trust_remote_code=False), str(tmp_path / "c"))


def test_an_engine_without_texts_has_no_tokenizer_and_a_named_one_wins(folder: Path, tmp_path: Path) -> None:
    settings = called(folder, "llama", "GPT2Tokenizer")
    found = engine_args(settings, folder=str(tmp_path))
    assert (found.tokenizer, found.tokenizer_mode, found.skip_tokenizer_init) == (f"{tmp_path}/tokenizer", "hf", False)
    assert engine_args(replace(settings, needs_tokenizer=False), folder="").skip_tokenizer_init
    named = changed(settings, vllm={"tokenizer": "another"})
    assert engine_args(named, folder=str(tmp_path)).tokenizer == "another"


@pytest.mark.deep
@pytest.mark.ray
def test_a_profile_has_the_engines_steps_each_time(rollouts: WorkerGroup, tmp_path: Path) -> None:
    for number in (1, 2):
        rollouts.call(0, "profile", "start_profile")
        generate(rollouts, 0, PROMPTS, sampling(max_tokens=4, ignore_eos=True))
        rollouts.call(0, "profile", "stop_profile", str(tmp_path / f"{number}.json.gz"))
    generate(rollouts, 0, PROMPTS, sampling(max_tokens=4))
    assert sorted(os.listdir(tmp_path)) == ["1.json.gz", "2.json.gz"]
    for number in (1, 2):
        with gzip.open(tmp_path / f"{number}.json.gz", "rt") as stream:
            names = [event["name"] for event in json.load(stream)["traceEvents"] if event["ph"] == "X"]
        counts = [re.match(r"execute_context_(\d+)\(\d+\)_generation_(\d+)", name) for name in names]
        tokens = sum(int(found[1]) + int(found[2]) for found in counts if found)
        assert tokens == len(PROMPTS) * 2 * 4, "of all steps, whenever each prompt came"
        assert {"aten::embedding", "aten::linear"} & set(names)
    with refuses(EngineError, "vLLM", "profiler-config"):  # of an engine that was made without one
        rollouts.call(1, "profile", "start_profile")


@pytest.mark.parametrize(
    ("written", "ends"),
    [(["rank0.177"], [""]), (["rank0.178", "rank1.177", "rank10.177"], ["_worker0", "_worker1", "_worker2"]), ([], [])],
)
def test_each_process_of_an_engine_has_a_file(tmp_path: Path, written: list[str], ends: list[str]) -> None:
    folder = tmp_path / ".rollout3"
    settings = engine_settings(kv_cache_memory_gib=None, profile_dir=str(folder))
    folder.mkdir()
    (folder / "rank7.1.pt.trace.json.gz").write_text("of a step that was not ended")
    clear_traces(settings)
    folder.mkdir()
    for name in [*(f"{each}.pt.trace.json.gz" for each in reversed(written)), "rank0.profiler_out.txt"]:
        (folder / name).write_text(name)
    if written:
        take_traces(settings, tmp_path / "rollout_rank3.json.gz")
    else:
        with refuses(EngineError, str(folder), "actor_rollout_ref.rollout.engine_kwargs.vllm.profiler_config"):
            take_traces(settings, tmp_path / "rollout_rank3.json.gz")
    found = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    pairs = zip(ends, written, strict=True)
    assert found == {f"rollout_rank3{end}.json.gz": f"{each}.pt.trace.json.gz" for end, each in pairs}
