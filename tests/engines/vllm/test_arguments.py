"""What vLLM's own config makes of a run's settings on GPUs. There is none here: vLLM is told that there are."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.auto import tokenization_auto

from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import load_tokenizer
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.arguments import clear_traces, engine_args, take_traces, tokenizer_args
from grpo_dist.engines.vllm.starting import quiet_environment
from grpo_dist.errors import EngineError
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.plan import make_plan
from grpo_dist.runtime.group import WorkerGroup
from tests.engines.vllm.test_engine import PROMPTS, generate, sampling
from tests.messages import refuses
from tests.worker_settings import changed, engine_settings

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 64.0, "original_max_position_embeddings": 512}
RUNS = {
    "eight": ["cluster=node8"],
    "one": ["cluster=single_gpu"],
    "asleep": ["cluster=single_gpu", f"{ROLLOUT}.free_cache_engine=true"],
    "unheeded": ["cluster=node8", f"{ROLLOUT}.free_cache_engine=true"],
    "split": ["cluster=node8", f"{ROLLOUT}.tensor_model_parallel_size=2", "actor_rollout_ref.nccl_timeout=77"],
    "eager": ["cluster=node8", f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.max_num_seqs=32"],
    "unchunked": [
        "cluster=node8",
        f"{ROLLOUT}.enable_chunked_prefill=false",
        f"{ROLLOUT}.max_num_batched_tokens=64",
        f"{ROLLOUT}.max_num_seqs=64",
        f"{ROLLOUT}.kv_cache_memory_gib=1.5",
        f"{ROLLOUT}.gpu_memory_utilization=0.5",
        f"{ROLLOUT}.dtype=fp16",
    ],
    "long": [
        *("cluster=node8", "data.max_response_length=30000", f"{ROLLOUT}.max_model_len=32768"),
        *(f"{ROLLOUT}.enable_chunked_prefill=true", f"{ROLLOUT}.max_num_batched_tokens=2048"),
        f"{MODEL}.head_dtype=fp32",
        f"{MODEL}.override_config.max_position_embeddings=32768",
        f"{MODEL}.override_config.rope_parameters={{{', '.join(f'{name}: {value}' for name, value in YARN.items())}}}",
    ],
    "own": ["cluster=node8", f"{ROLLOUT}.engine_kwargs.vllm={{compilation_config: {{cudagraph_mode: PIECEWISE}}}}"],
}


def settings(overrides: list[str]) -> EngineSettings:
    config, _ = load_config([f"{ROLLOUT}.kv_cache_memory_gib=null", *overrides])  # the built-in model names a size
    found = make_plan(config).engine(0)
    return changed(found, path=resolve_model_path(found.model.path))


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By run: the parts of vLLM's config that tests/engines/vllm/faked_gpu.py shows."""
    file = tmp_path_factory.mktemp("settings") / "runs.pickle"
    file.write_bytes(pickle.dumps({name: settings(overrides) for name, overrides in RUNS.items()}))
    command = [sys.executable, "-m", "tests.engines.vllm.faked_gpu", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_defaults_are_fast_and_the_log_probs_those_of_the_sampled_distribution(on_gpus) -> None:
    found = on_gpus["eight"]
    assert (found["device"], found["dtype"]) == ("cuda", "torch.bfloat16")
    assert (found["cuda_graphs"], found["compilation"]) == ("FULL_AND_PIECEWISE", "VLLM_COMPILE")
    assert not found["enforce_eager"]
    assert found["largest_graph"] >= found["max_num_seqs"] == 256, "a full batch decodes in one graph"
    assert found["prefix_caching"], "the responses to a prompt share its cache"
    assert found["chunked_prefill"]
    assert found["max_num_batched_tokens"] == 8192
    assert found["logprobs"] == "processed_logprobs"
    assert (found["gpu_memory_utilization"], found["kv_cache_memory_bytes"]) == (0.8, None)
    assert found["weights"] == "grpo_dist"


def test_every_run_has_the_model_runner_that_the_page_on_clusters_tells_of(on_gpus) -> None:
    assert {name: found["runner_v2"] for name, found in on_gpus.items()} == dict.fromkeys(RUNS, True)


def test_one_gpu_leaves_memory_to_the_other_roles(on_gpus) -> None:
    config, _ = load_config(RUNS["one"])
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    assert 0 < share <= 0.5
    assert on_gpus["one"]["gpu_memory_utilization"] == share
    assert on_gpus["one"] | {"gpu_memory_utilization": 0.8} == on_gpus["eight"]


def test_an_engine_that_shares_its_gpu_can_give_its_memory_back(on_gpus) -> None:
    assert on_gpus["asleep"] == on_gpus["one"] | {"sleep_mode": True}
    assert on_gpus["unheeded"] == on_gpus["eight"], "its GPU is its own"
    assert not on_gpus["eight"]["sleep_mode"]


def test_several_gpus_are_processes_of_the_engine_also_in_a_placement_group(on_gpus) -> None:
    """vLLM's own choice there would be Ray, which refuses a bundle of several GPUs."""
    split, one = on_gpus["split"], on_gpus["eight"]
    assert (split["executor"], split["executor_class"], split["processes"]) == ("mp", "MultiprocExecutor", 2)
    assert (one["executor"], one["executor_class"], one["processes"]) == ("uni", "UniProcExecutor", 1)
    assert (split["timeouts"], one["timeouts"]) == ([77, 77], [None, None]), "of NCCL's groups and of gloo's"
    same = {"executor", "executor_class", "processes", "timeouts"}
    assert {k: v for k, v in split.items() if k not in same} == {k: v for k, v in one.items() if k not in same}


def test_what_the_config_says_is_what_vllm_does(on_gpus) -> None:
    eager, unchunked = on_gpus["eager"], on_gpus["unchunked"]
    assert eager["enforce_eager"]
    assert (eager["cuda_graphs"], eager["compilation"], eager["max_num_seqs"]) == ("NONE", "NONE", 32)
    assert not unchunked["chunked_prefill"]
    assert unchunked["max_num_batched_tokens"] == 128, "the longest sequence: prompts are not cut"
    assert unchunked["kv_cache_memory_bytes"] == 3 << 29
    assert unchunked["gpu_memory_utilization"] == 0.01, "or vLLM would not start where half of the GPU is not free"
    assert unchunked["dtype"] == "torch.float16"
    assert on_gpus["own"]["cuda_graphs"] == "PIECEWISE"


def test_a_long_context_is_cut_into_chunks_and_its_positions_are_scaled(on_gpus) -> None:
    found = on_gpus["long"]
    assert (found["max_model_len"], found["chunked_prefill"], found["max_num_batched_tokens"]) == (32768, True, 2048)
    assert found["rope"] == YARN
    assert (found["head"], on_gpus["eight"]["head"]) == ("torch.float32", "torch.bfloat16"), "beside other changes"
    assert on_gpus["eight"]["rope"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_the_users_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    quiet_environment("cuda")
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ
    quiet_environment("cpu")
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


TEXT = "She had 1234 and 100 apples;  it's 16-12.\n\tÉtienne's <|end|> Ⅳ ﬁ 両"
SPECIAL = ["<|end|>", "<s>", "<unk>"]
CORPUS = ["12 123 1234 16 100 1000 she had apples it's Étienne's"] * 50
CLASSES = sorted({name for name in tokenization_auto.TOKENIZER_MAPPING_NAMES.values() if name} | {"LlamaTokenizerFast"})


def byte_level() -> Tokenizer:
    """SmolLM2's form: digits apart."""
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = level
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """A unigram model with a normalizer, which marks the beginning of a word."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
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


def all_names() -> Iterator[tuple[str, str]]:
    yield from (("llama", name) for name in CLASSES)
    yield from ((model_type, "GPT2Tokenizer") for model_type in ("qwen2", "phi3", "deepseek_v3", "mistral", "gemma3"))


@pytest.mark.deep
def test_vllms_tokens_are_those_of_training(folder: Path, tmp_path: Path) -> None:
    differing = 0
    conversation = [{"role": "user", "content": TEXT}]
    for number, (model_type, name) in enumerate(all_names()):
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


SETTINGS = engine_settings(kv_cache_memory_gib=None)


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


@pytest.mark.deep
@pytest.mark.ray
def test_an_engine_that_was_made_without_one_says_so(rollouts: WorkerGroup, tmp_path: Path) -> None:
    with refuses(EngineError, "vLLM", "profiler-config"):
        rollouts.call(1, "profile", "start_profile")


@pytest.mark.parametrize(
    ("written", "taken"),
    [
        (["rank0.177.pt.trace.json.gz"], {"rollout_rank3.json.gz": "rank0.177.pt.trace.json.gz"}),
        (
            ["rank1.177.pt.trace.json.gz", "rank0.178.pt.trace.json.gz", "rank10.177.pt.trace.json.gz"],
            {
                "rollout_rank3_worker0.json.gz": "rank0.178.pt.trace.json.gz",
                "rollout_rank3_worker1.json.gz": "rank1.177.pt.trace.json.gz",
                "rollout_rank3_worker2.json.gz": "rank10.177.pt.trace.json.gz",
            },
        ),
    ],
)
def test_each_process_of_an_engine_has_a_file(tmp_path: Path, written: list[str], taken: dict[str, str]) -> None:
    settings = replace(SETTINGS, profile_dir=str(tmp_path / ".rollout3"))
    folder = tmp_path / ".rollout3"
    folder.mkdir()
    (folder / "rank7.1.pt.trace.json.gz").write_text("of a step that was not ended")
    clear_traces(settings)
    folder.mkdir()
    for name in [*written, "rank0.profiler_out.txt"]:
        (folder / name).write_text(name)
    take_traces(settings, tmp_path / "rollout_rank3.json.gz")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == taken


def test_without_a_trace_the_reason_is_named(tmp_path: Path) -> None:
    settings = replace(SETTINGS, profile_dir=str(tmp_path / ".rollout0"))
    with refuses(EngineError, f"{tmp_path}/.rollout0", "actor_rollout_ref.rollout.engine_kwargs.vllm.profiler_config"):
        take_traces(settings, tmp_path / "rollout_rank0.json.gz")
