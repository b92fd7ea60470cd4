"""`grpo-dist NAME`: the commands are found, also by a near name; files of `--output`; `report`."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import grpo_dist
from grpo_dist.cli.arguments import check_output, write_output
from grpo_dist.cli.entry import ENTRIES, main
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.registry import load_attribute
from tests.cli.conftest import Call
from tests.messages import refuses, says
from tests.report.runs import write_run, write_step
from tests.report.test_page import data_in

ROOT = Path(grpo_dist.__file__).parents[1]


@pytest.mark.parametrize("arguments", [[], ["help"], ["-h"], ["--help"]])
def test_alone_it_lists_the_commands(arguments: list[str], call: Call) -> None:
    says(call(*arguments).out, *ENTRIES, "--version", "python -m grpo_dist")
    assert all(callable(load_attribute(function, key=name)) for name, (function, _) in ENTRIES.items())


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "help"])
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["help", name])
    except SystemExit as end:  # argparse's way
        code = end.code
    assert code == 0
    assert "usage:" in capsys.readouterr().out


def test_what_is_no_command_is_answered_with_the_nearest(call: Call) -> None:
    key = "data.train_batch_size=8"
    for typed, advice in (("trian", "train"), ("exprot", "export"), (key, f"grpo-dist train {key}")):
        told = call(typed, code=2).err
        says(told, typed, *ENTRIES)
        assert f" {advice}?" in told


def test_train_is_the_main_command_and_data_writes_rows(call: Call, tmp_path: Path) -> None:
    says(call("train", "trainer.dry_run=config").out, "trainer.dry_run=config", "builtin:arithmetic/train")
    says(call("train", "algorithm.adv_estimater=grpo", code=2).err, "algorithm.adv_estimator")
    says(call("data", "arithmetic", "--local_save_dir", tmp_path).out, tmp_path / "train.parquet")
    assert (tmp_path / "train.parquet").is_file()


def test_the_version_is_in_one_place(call: Call) -> None:
    assert call("--version").out == f"grpo_dist {grpo_dist.__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "grpo_dist.__version__"}
    module, _, function = project["project"]["scripts"]["grpo-dist"].partition(":")
    assert (module, function) == (main.__module__, "main")


@pytest.mark.parametrize("command", [["-m", "grpo_dist.main"], ["-m", "grpo_dist", "doctor"]])
def test_a_folder_that_is_gone_is_told(command: list[str], tmp_path: Path) -> None:
    (gone := tmp_path / "job").mkdir()
    started = ["bash", "-c", 'rmdir "$PWD" && exec "$@"', "bash", sys.executable, *command]
    done = subprocess.run(started, cwd=gone, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    says(done.stderr, 'cd "$PWD"')


# --- files of --output ------------------------------------------------------------------------------------------------
def test_files_are_written_whole_or_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there.json").write_text("old")
    (tmp_path / "folder").mkdir()
    refused = ("no/where.json", "no", True), ("there.json", "there.json", False), ("folder", "folder", True)
    for name, part, replaces in refused:
        with refuses(ConfigError, "--output", tmp_path / part):
            check_output(str(tmp_path / name), replaces=replaces)
    monkeypatch.setenv("HOME", str(tmp_path))
    for output in (str(tmp_path / "new.json"), "~/new.json", None):
        check_output(output)
    check_output(str(tmp_path / "there.json"), replaces=True)
    path = tmp_path / "there.json"
    write_output(path, "old")
    write_output(path, "new")
    assert path.read_text() == "new"

    def full(self: Path, *args: object, **kwargs: object) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with refuses(ConfigError, f"--output {path}"):
        write_output(path, "newer")
    assert path.read_text() == "new"
    assert {*tmp_path.iterdir()} == {path, tmp_path / "folder"}


# --- report --------------------------------------------------------------------------------------------------------
def test_a_report(tmp_path: Path, call: Call) -> None:
    run = write_run(tmp_path / "run", [{"step": step, "critic/score/mean": 0.5} for step in (1, 2, 3)])
    other = write_run(tmp_path / "other", [{"step": 1, "critic/score/mean": 0.1}])
    for step in (1, 2, 3):
        write_step(run, step, ["#### 1", "2"], [1.0, 0.0])
    out = call("report", run, "--compare", other, "--responses", "4").out
    says(out, run / "report.html", "--responses")
    assert [line.split("; ")[0].split(": ")[1] for line in out.splitlines()[:2]] == ["steps 3", "steps 1"], "each run"
    written = (run / "report.html").read_text()
    assert "<dt>steps</dt><dd>3</dd>" in written.partition("<noscript>")[2].partition("</noscript>")[0]
    data = data_in(written)
    assert data.keys() == {"overview", "step-1", "step-3"}
    assert data["step-3"]["pieces"]
    assert len(data["overview"]["charts"][0]["figure"]["data"]) == 2
    call("report", run, "--output", tmp_path / "here.html")
    assert data_in((tmp_path / "here.html").read_text()).keys() == {"overview", "step-1", "step-2", "step-3"}
    for arguments, parts in (
        ([tmp_path / "none"], [tmp_path / "none", "metrics.jsonl"]),
        ([run, "--output", tmp_path / "no" / "where.html"], [f"--output {tmp_path / 'no' / 'where.html'}"]),
    ):
        says(call("report", *arguments, code=2).err, *parts)
