"""make dist: the wheel in an environment outside of the checkout, which has its packages and nothing else of it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import grpo_dist

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not UV.exists() or not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs uv, which make setup installs, and a git checkout")
    folder = tmp_path_factory.mktemp("dist")
    command = ["bash", str(ROOT / "scripts" / "dist.sh"), str(folder)]
    subprocess.run(command, check=True, env=os.environ | {"UV": str(UV), "PYTHON": sys.executable})
    return folder


@pytest.fixture(scope="module")
def python(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel alone, which finds all other packages in that of the checkout."""
    folder = tmp_path_factory.mktemp("elsewhere") / "environment"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    # A folder in a .pth file is searched, but its own .pth files, such as that of the checkout, are not read.
    site.joinpath("of_the_checkout.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wheel = next(dist.glob("*.whl"))
    subprocess.run([UV, "pip", "install", "--quiet", "--no-deps", "--python", python, wheel], check=True)
    return python


def run(python: Path, *arguments: str, cwd: Path) -> str:
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([python, *arguments], cwd=cwd, env=plain, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_have_the_version_and_every_file_of_the_package(dist: Path) -> None:
    names = {path.name for path in dist.iterdir() if not path.name.startswith(".")}
    stem = f"grpo_dist-{grpo_dist.__version__}"
    assert names == {f"{stem}-py3-none-any.whl", f"{stem}.tar.gz"}
    tracked = subprocess.run(["git", "ls-files", "grpo_dist"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = set(tracked.stdout.split())
    with zipfile.ZipFile(dist / f"{stem}-py3-none-any.whl") as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == files
    with tarfile.open(dist / f"{stem}.tar.gz") as source:
        assert files <= {name.removeprefix(f"{stem}/") for name in source.getnames()}


@pytest.mark.deep
def test_the_wheel_is_a_package_of_its_own(python: Path, tmp_path: Path) -> None:
    where = run(python, "-c", "import grpo_dist; print(grpo_dist.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(python.parents[1])
    assert run(python, "-m", "grpo_dist", "--version", cwd=tmp_path) == f"grpo_dist {grpo_dist.__version__}\n"
    told = subprocess.run(
        [python.with_name("grpo-dist"), "help", "lr"], capture_output=True, text=True, check=True
    ).stdout
    assert "actor_rollout_ref.actor.optim.lr" in told


@pytest.mark.ray
@pytest.mark.long
def test_the_main_job_runs_from_the_wheel(python: Path, tmp_path: Path) -> None:
    small = ["trainer.total_training_steps=2", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4"]
    small += ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    local = "ray_kwargs.ray_init.address=local"
    told = run(python, "-m", "grpo_dist.main", *small, local, "trainer.default_local_dir=run", cwd=tmp_path)
    assert "2 training steps" in told
    assert (tmp_path / "run" / "huggingface" / "model.safetensors").is_file()
    run(python, "-m", "grpo_dist", "report", "run", cwd=tmp_path)
    assert (tmp_path / "run" / "report.html").is_file()
