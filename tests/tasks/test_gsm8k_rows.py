"""GSM8K to verl's parquet files, from a fixture and, where it is there, from the whole release."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.tasks.prepare import main
from tests.messages import says
from tests.rewards.scoring import scored
from tests.tasks.conftest import prompts_of

RELEASE = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k"
EXAMPLES = [
    {"question": "Two plus two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "A house's price?", "answer": "It costs $70,000.\n#### 70,000"},
    {"question": "Below zero?", "answer": "3 - 8 = -5\n#### -5"},
]


@pytest.fixture
def release(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    for split, rows in (("train", EXAMPLES), ("test", EXAMPLES[:1])):
        (folder / f"{split}.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    return folder


def gsm8k(raw: Path, out: Path) -> int:
    return main(["gsm8k", "--local_dataset_path", str(raw), "--local_save_dir", str(out)])


def test_rows_are_verls(release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out"
    assert gsm8k(release, out) == 0
    assert capsys.readouterr().out == f"{out}/train.parquet: 3 rows\n{out}/test.parquet: 1 rows\n"
    rows = pq.read_table(out / "train.parquet").to_pylist()
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    assert rows[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"A house's price? {instruction}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "70000"},
        "extra_info": {"split": "train", "index": 1} | EXAMPLES[1],
    }
    assert [r["reward_model"]["ground_truth"] for r in rows] == ["4", "70000", "-5"]
    assert [p.ground_truth for p in prompts_of(out / "test.parquet")] == ["4"]
    assert sorted(p.name for p in out.iterdir()) == ["test.parquet", "train.parquet"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": "q", "answer": "just 4"}', ["test.jsonl, line 2", "answer", "'#### NUMBER'"]),
        ('{"question": "q"}', ["test.jsonl, line 2", "'answer'", "question"]),
        ('{"question": " ", "answer": "#### 4"}', ["non-empty text", "'question'"]),
        ("{", ["test.jsonl, line 2", "valid JSON"]),
    ],
)
def test_a_bad_example_leaves_old_files_alone(
    release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: list[str]
) -> None:
    assert gsm8k(release, tmp_path) == 0
    before = (tmp_path / "train.parquet").read_bytes()
    (release / "train.jsonl").write_text(json.dumps(EXAMPLES[0]))
    (release / "test.jsonl").write_text(json.dumps(EXAMPLES[0]) + "\n" + line)
    capsys.readouterr()
    assert gsm8k(release, tmp_path) == 2
    says(capsys.readouterr().err, *words)
    assert (tmp_path / "train.parquet").read_bytes() == before


def test_a_failed_write_leaves_the_old_file(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.parquet").write_bytes(b"old")

    def full_disk(table: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(pq, "write_table", full_disk)
    assert gsm8k(release, tmp_path) == 2
    says(capsys.readouterr().err, f"--local_save_dir={tmp_path}", "write", "space left")
    assert (tmp_path / "train.parquet").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["train.parquet"]


def test_missing_folder_and_no_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gsm8k(tmp_path / "gone", tmp_path) == 2
    says(capsys.readouterr().err, "--local_dataset_path=", "train.jsonl")

    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(["gsm8k", "--local_save_dir", str(tmp_path)]) == 2
    says(capsys.readouterr().err, "install datasets")

    broken = types.ModuleType("datasets")

    def offline(*args: object, **kwargs: object) -> None:
        raise ConnectionError("offline")

    broken.load_dataset = offline  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", broken)
    assert main(["gsm8k", "--local_save_dir", str(tmp_path)]) == 2
    says(capsys.readouterr().err, "openai/gsm8k", "ConnectionError: offline")


def test_from_the_hub(tmp_path: Path, serve) -> None:
    asked = serve(EXAMPLES)
    assert main(["gsm8k", "--local_save_dir", str(tmp_path)]) == 0
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert len(prompts_of(tmp_path / "test.parquet")) == 3


def test_parquet_files_named_as_on_the_hub(release: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub" / "main" / "data"
    hub.mkdir(parents=True)
    for split, shards in (("train", [EXAMPLES[:2], EXAMPLES[2:]]), ("test", [EXAMPLES[:1]])):
        for i, rows in enumerate(shards):
            pq.write_table(pa.Table.from_pylist(rows), hub / f"{split}-{i:05}-of-{len(shards):05}.parquet")
    assert gsm8k(hub.parent, tmp_path / "b") == 0
    assert gsm8k(release, tmp_path / "a") == 0
    for split in ("train", "test"):
        a, b = (pq.read_table(tmp_path / out / f"{split}.parquet").to_pylist() for out in "ab")
        assert a == b


@pytest.mark.skipif(not RELEASE.is_dir(), reason="the GSM8K release is not on this machine")
def test_whole_release_its_own_answers_earn_one(tmp_path: Path) -> None:
    assert gsm8k(RELEASE, tmp_path) == 0
    for split, count in (("train", 7473), ("test", 1319)):
        prompts = prompts_of(tmp_path / f"{split}.parquet")
        assert len(prompts) == count
        for prompt, other in zip(prompts, prompts[1:] + prompts[:1], strict=True):
            answer, question = prompt.extra_info["answer"], prompt.extra_info["question"]
            scores = [
                scored(text, prompt.ground_truth, prompt.data_source, prompt.extra_info).score
                for text in (answer, question, answer.partition("####")[0], other.extra_info["answer"])
            ]
            assert scores == [1.0, 0.0, 0.0, float(other.ground_truth == prompt.ground_truth)], prompt.location
