"""Stop and go on, on as many ranks, fewer or more, as if never stopped; what a checkpoint and an export hold."""

import errno
import hashlib
import io
import json
import os
import pickle
import random
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file

from grpo_dist.config.schema_roles import LoraSection
from grpo_dist.engines.train import durable_files, hf_export
from grpo_dist.engines.train.checkpoint import SafeReader, copied, load_state
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from tests.disks import MIB, small_disk
from tests.engines.train.plain import assert_same, built, flat, log_probs, own_rows, save, step, told, weights
from tests.engines.train.test_model_loading import DEEPSEEK
from tests.messages import refuses, says
from tests.models import add_tokenizer, random_batch, random_model, scheduled, trainable_engine
from tests.ranks import run_ranks
from tests.shards import all_tensors, tensor_bytes
from tests.tiers import first
from tests.worker_settings import lora


def engine_with_schedule(path: str, optimizer: dict[str, Any] | None = None, **changes: Any) -> FSDPEngine:
    """Warm-up and cosine: every step has a learning rate of its own, so a lost schedule shows."""
    return built(path, scheduled(**(optimizer or {})), **changes)


def train(engine: FSDPEngine, rank: int, number: int) -> dict[str, float]:
    return step(engine, own_rows(random_batch(num_groups=4, n=2, seed=number), rank))


def draw() -> list[float]:
    return [*torch.rand(3).tolist(), random.random(), random.gauss(0, 1)]


def uninterrupted(rank: int, path: str, folder: Path) -> dict[str, Any]:
    """Two ranks: steps 0 and 1, save, step 2; a fresh engine that loads; and saves that fail."""
    engine = engine_with_schedule(path)
    for number in range(2):
        train(engine, rank, number)
    saved = weights(engine)
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    random.gauss(0, 1)  # which keeps a second number for the next call
    engine.begin_save(folder / "two")
    metrics, drawn = train(engine, rank, 2), draw()  # while it is written
    files = engine.finished_save(wait=True)
    assert engine.finished_save(wait=False) == files, "it may be asked more than once"
    failures = [told(save, engine, folder / "two/__0_0.distcp")]  # a file, not a folder
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # as on a full disk: the shards are larger
    failures.append(told(save, engine, folder / "full"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    engine_with_schedule(path).load_checkpoint(folder / "two")
    found = {"saved": saved, "after": weights(engine), "metrics": metrics, "failures": failures}
    return found | {"files": files, "drawn": drawn, "drawn again": draw()}


def go_on(rank: int, models: dict[str, str], source: Path, target: Path) -> dict[str, Any]:
    engine = engine_with_schedule(models["tied"])
    engine.load_checkpoint(source)
    loaded = weights(engine)
    save(engine, target)
    places = (source / "absent", "tied"), (source, "untied")
    errors = [told(engine_with_schedule(models[model]).load_checkpoint, folder) for folder, model in places]
    return {"loaded": loaded, "metrics": train(engine, rank, 2), "after": weights(engine), "errors": errors}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def runs(random_models: dict[str, str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        "uninterrupted": run_ranks(2, uninterrupted, random_models["tied"], folder),
        "2 -> 1": run_ranks(1, go_on, random_models, folder / "two", folder / "one"),
        "1 -> 2": run_ranks(2, go_on, random_models, folder / "one", folder / "again"),
    }


@pytest.mark.parametrize("ranks", ["2 -> 1", "1 -> 2"])
def test_a_run_goes_on_as_if_it_had_not_been_stopped(runs: dict, ranks: str, folder: Path) -> None:
    expected = runs["uninterrupted"][0]
    assert expected["metrics"]["actor/lr"] == pytest.approx(1e-2), "step 2 of a warm-up of 2: the peak"
    moved = np.concatenate([(expected["after"][name] - expected["saved"][name]).ravel() for name in expected["saved"]])
    assert 1e-4 < np.abs(moved).mean() < 0.9e-2, "a fresh Adam would move nearly every weight by the rate itself"
    for result in runs[ranks]:
        assert result["metrics"]["actor/lr"] == expected["metrics"]["actor/lr"]
        assert result["metrics"]["actor/grad_norm"] == pytest.approx(expected["metrics"]["actor/grad_norm"], rel=1e-4)
        assert_same(result["loaded"], expected["saved"])
        assert_same(result["after"], expected["after"], rtol=1e-4, atol=1e-5)
        absent, other = result["errors"]
        says(absent, "CheckpointError", folder, "checkpoint")
        says(other, "CheckpointError", "lm_head")


def test_each_rank_tells_what_it_wrote_or_could_not_write_and_draws_on(runs: dict, folder: Path) -> None:
    written = {name: digest for result in runs["uninterrupted"] for name, digest in result["files"].items()}
    assert written == {path.name: durable_files.digest_file(path) for path in (folder / "two").iterdir()}
    assert set(written) == {".metadata", "__0_0.distcp", "__1_0.distcp", "random_0.pt", "random_1.pt"}
    first, second = (result["drawn"] for result in runs["uninterrupted"])
    assert not set(first) & set(second)
    for result in runs["uninterrupted"]:
        assert result["drawn"] == result["drawn again"]
        no_folder, full = result["failures"]
        says(no_folder, "CheckpointError", "rank 0:")
        assert "File exists" in no_folder or "Not a directory" in no_folder
        says(full, "rank 0:", "rank 1:", "Errno 27")


CHANGED = {"lr": 3e-3, "betas": (0.8, 0.9), "weight_decay": 0.5, "override_optimizer_config": {"eps": 1e-4}}


def go_on_with_other_settings(rank: int, path: str, source: Path) -> dict[str, Any]:
    engine = engine_with_schedule(path, CHANGED)
    engine.load_checkpoint(source)
    [group] = engine.optimizer.param_groups
    return {"group": dict(group, params=None), "steps": [train(engine, rank, number) for number in (2, 3)]}


def test_settings_of_the_optimizer_are_those_of_the_present_config(
    runs: dict, random_models: dict[str, str], folder: Path
) -> None:
    [result] = run_ranks(1, go_on_with_other_settings, random_models["tied"], folder / "one")
    first, second = result["steps"]
    assert first["actor/lr"] == pytest.approx(3e-3), "step 2 of a warm-up of 2: the peak"
    assert second["actor/lr"] == pytest.approx(3e-3 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi / 4))))
    names = ("weight_decay", "betas", "eps", "initial_lr")
    assert [result["group"][name] for name in names] == [0.5, (0.8, 0.9), 1e-4, 3e-3]
    norm = runs["uninterrupted"][0]["metrics"]["actor/grad_norm"]
    assert first["actor/grad_norm"] == pytest.approx(norm, rel=1e-4), "the weights are the saved ones"


def saved_first(rank: int, path: str, folder: Path) -> None:
    """An engine alone, one that was saved before its first step, and one resumed from there."""
    alone, saved, resumed = (engine_with_schedule(path) for _ in range(3))
    save(saved, folder)
    resumed.load_checkpoint(folder)
    for engine in (alone, saved, resumed):
        train(engine, rank, 0)
        np.testing.assert_array_equal(flat(engine), flat(alone))


@pytest.mark.deep
def test_a_checkpoint_before_the_first_step_changes_no_step(random_models: dict[str, str], tmp_path: Path) -> None:
    run_ranks(1, saved_first, random_models["tied"], tmp_path / "first")


# --- what is in a checkpoint -----------------------------------------------------------------------------------------
def test_a_copy_is_one_of_everything() -> None:
    weights, count = torch.arange(6.0).reshape(2, 3), torch.tensor(2.0)
    state = {"w": weights, "view": weights[1:], "groups": [{"betas": (0.9, 0.999), "step": count}], "n": None}
    copy = copied(state)
    weights.fill_(-1)
    count.add_(1)
    state["groups"].append({})
    assert (copy["w"].tolist(), copy["view"].tolist()) == ([[0, 1, 2], [3, 4, 5]], [[3, 4, 5]])
    assert copy["view"].untyped_storage().nbytes() == 3 * 4, "not the whole that it is a part of"
    assert (copy["groups"], copy["n"]) == ([{"betas": [0.9, 0.999], "step": torch.tensor(2.0)}], None)


def saved_thrice(rank: int, models: dict[str, str], folder: Path, lora: LoraSection) -> dict[str, Any]:
    """What engines say that they will write, before their first step, after it, and after a pass."""
    engines = {name: engine_with_schedule(models[name]) for name in ("tied", "untied", "experts")}
    engines["lora"] = trainable_engine(models["tied"], lora=lora)
    found = {}
    for name, engine in engines.items():
        found[name] = [engine.checkpoint_bytes()]
        train(engine, rank, 0)
        save(engine, folder / name)
        found[name].append(engine.checkpoint_bytes())
        log_probs(engine, random_batch(num_groups=1, n=2))  # which leaves weights gathered
        found[name].append(engine.checkpoint_bytes())
    return found


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_know_what_they_will_write(ranks: int, random_models: dict[str, str], tmp_path: Path) -> None:
    told = run_ranks(ranks, saved_thrice, random_models, tmp_path, lora())
    assert told[0] == told[-1]
    for name, sizes in told[0].items():
        written = {key: size for key, size in tensor_bytes(tmp_path / name).items() if not key.endswith(".step")}
        assert sizes == [sum(written.values())] * 3, name
        assert sum(path.stat().st_size for path in (tmp_path / name).iterdir()) > sizes[0]
    moments = [key for key in tensor_bytes(tmp_path / "lora") if "exp_avg_sq" in key]
    assert moments
    assert all("lora_" in key for key in moments), "of the factors alone, beside all weights"


def test_on_other_ranks_no_bit_changes(runs: dict, folder: Path) -> None:
    first, *others = [all_tensors(folder / name) for name in ("two", "one", "again")]
    assert sum("exp_avg" in name for name in first) == 2 * sum(name.startswith("model.") for name in first)
    assert "model.model.embed_tokens.weight" in first
    assert not [name for name in first if "lm_head" in name]
    for other in others:
        assert_same(other, first)


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Malicious:
    def __init__(self, proof: Path) -> None:
        self.command = f"touch {proof}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


STATE = {"model": {"w": torch.arange(6.0)}, "schedule": {"last_epoch": 3}}


def test_a_malicious_index_is_refused(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    proof = tmp_path / "proof"
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.planner_data = Malicious(proof)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    says(told(load_state, STATE, tmp_path), "CheckpointError", ".metadata", "posix.system")
    assert not proof.exists()
    with pytest.raises(AttributeError):  # torch's own reader runs it, and fails only afterwards
        dcp.FileSystemReader(tmp_path).read_metadata().planner_data.anything  # noqa: B018
    assert proof.exists()


CALLS = ("torch.load", "torch.hub.load", "builtins.eval", "builtins.getattr")
INDEXES = [("c{}\n{}\n.".format(*name.rsplit(".", 1)).encode(), [name]) for name in CALLS]
INDEXES.append((pickle.dumps({"state_dict_metadata": {}}), ["index", "dict"]))


@pytest.mark.parametrize(("index", "parts"), INDEXES, ids=[*CALLS, "another kind"])
def test_an_index_that_names_something_else(tmp_path: Path, index: bytes, parts: list[str]) -> None:
    (tmp_path / ".metadata").write_bytes(index)
    says(told(SafeReader(tmp_path).read_metadata), "CheckpointError", ".metadata", *parts)


def test_a_malicious_value_is_refused(tmp_path: Path) -> None:
    """A number's bytes are a pickle at the end of the file."""
    proof, bad, state = tmp_path / "p", io.BytesIO(), {"number": 0.5}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    metadata = SafeReader(tmp_path).read_metadata()
    [place] = metadata.storage_data.values()
    torch.save(Malicious(proof), bad)
    data = (tmp_path / place.relative_path).read_bytes()
    (tmp_path / place.relative_path).write_bytes(data + bad.getvalue())
    place.offset, place.length = len(data), len(bad.getvalue())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    says(told(load_state, state, tmp_path), "CheckpointError", "Weights only")
    assert not proof.exists()


# --- files -----------------------------------------------------------------------------------------------------------
def test_a_digest_is_that_of_the_contents(tmp_path: Path) -> None:
    content = b"x" * 1_000_002 + b"y"  # of several reads
    (tmp_path / "file").write_bytes(content)
    blake2b = hashlib.blake2b(content, digest_size=32).hexdigest()
    assert durable_files.digest_file(tmp_path / "file") == durable_files.FileDigest(1_000_003, blake2b)
    with pytest.raises(FileNotFoundError):
        durable_files.digest_file(tmp_path / "nowhere")


def test_every_file_and_folder_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    (tmp_path / "a/b").mkdir(parents=True)
    durable_files.write_durably(tmp_path / "a/b/file", "text")
    assert flushed == [str(tmp_path / "a/b/file")]
    assert (tmp_path / "a/b/file").read_text() == "text"
    flushed.clear()
    durable_files.flush_tree(tmp_path)
    assert sorted(flushed) == [str(tmp_path / part) for part in ("", "a", "a/b", "a/b/file")]
    durable_files.flush_path(tmp_path / "a")
    assert flushed[-1] == str(tmp_path / "a")


def test_room_is_that_of_the_disk_also_for_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative folder is on the disk of the working directory."""
    with small_disk(tmp_path / "disk", mib=8) as disk:
        assert durable_files.free_bytes(disk) == 8 * MIB
        (disk / "file").write_bytes(bytes(3 * MIB))
        monkeypatch.chdir(disk)
        for folder in (disk, disk / "run" / "huggingface", Path("outputs/run")):
            assert durable_files.free_bytes(folder) == 5 * MIB
            durable_files.require_room(folder, 5 * MIB)
            with refuses(OSError, f"[Errno {errno.ENOSPC}]", f"{6 / 1024:.3g} GiB", f"{5 / 1024:.3g} GiB"):
                durable_files.require_room(folder, 6 * MIB)
        assert sorted(path.name for path in disk.iterdir()) == ["file"]
        monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_private_files_get_the_mode_of_new_ones(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        (tmp_path / "sub").mkdir()
        for name in ("model.safetensors", "sub/part"):
            (tmp_path / name).touch(mode=0o600)
        durable_files.publish_modes(tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"model.safetensors": 0o666 & ~umask, "part": 0o666 & ~umask, "sub": 0o777 & ~umask}


# --- the exported model ----------------------------------------------------------------------------------------------
def export_twice(rank: int, model: str, folder: Path) -> str:
    """Once as it should be; then in files of 30 kB where none may grow beyond 20: the first is refused on the way."""
    engine = trainable_engine(model)
    engine.export_hf_model(folder, "fp32")
    hf_export.EXPORT_FILE_BYTES = 30_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
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


def export_without_room(rank: int, model: str, folder: Path, told_of: list[str]) -> None:
    says(told(trainable_engine(model).export_hf_model, folder / "huggingface", "fp32"), *told_of)
    torch.distributed.barrier()
    assert [path.name for path in folder.iterdir()] == ["filler"]


def test_the_disk_is_asked_for_the_whole_model_first(random_models: dict[str, str], tmp_path: Path) -> None:
    """It has room for config and tokenizer, and for two of three parts of the weights."""
    size = sum(weight.nbytes for weight in load_file(Path(random_models["untied"], "model.safetensors")).values())
    with small_disk(tmp_path / "disk", mib=1) as disk:
        (disk / "filler").write_bytes(bytes(MIB - size * 2 // 3))
        parts = [f"{disk}/huggingface", f"{size / 2**30:.3g} GiB", "trainer.default_local_dir"]
        run_ranks(2, export_without_room, random_models["untied"], disk, parts)


def export(rank: int, model: str, folder: Path, lora: LoraSection | None) -> dict[str, Any]:
    hf_export.EXPORT_FILE_BYTES = 20_000
    engine = trainable_engine(model, lora=lora)
    step(engine, own_rows(random_batch(num_groups=2, n=2), rank), 1)
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


PADDING = [
    (None, (5, "<pad>"), None, 5),
    (None, (5, "<pad>"), "{{ eos_token }}", 5),
    (None, (2, "</s>"), None, None),  # conversations end in it: the end of sequence
    (None, (5, "<pad>"), "{{ messages[0].content }}<pad>", None),
    (None, (5, "<pad>"), "{{ messages[0].content + pad_token }}", None),
    (None, (None, None), None, None),
    (2, (5, "<pad>"), None, 2),  # trained where transformers reads it, in front of the end
    (2, (2, "</s>"), None, 2),
    (7, (5, "<pad>"), "<pad>", 7),
]


@pytest.mark.parametrize(("named", "padding", "template", "expected"), PADDING)
def test_transformers_reads_the_score_where_the_model_was_trained(
    named: int | None, padding: tuple[Any, Any], template: str | None, expected: int | None, caplog: Any
) -> None:
    """By the padding token that config.json had in training; another is named where no conversation ends in it."""
    config = SimpleNamespace(pad_token_id=named)
    names = {"pad_token_id": padding[0], "pad_token": padding[1], "eos_token_id": 2, "chat_template": template}
    hf_export._set_padding(config, SimpleNamespace(**names))
    assert config.pad_token_id == expected
    if warned := named is None and padding[0] is not None and expected is None:
        says(caplog.text, f"pad_token_id={padding[0]}")
    assert bool(caplog.text) == warned
