"""The build of torch and vLLM against the machine that is asked for."""

from __future__ import annotations

import pytest
import torch

from grpo_dist.engines import installed_build
from grpo_dist.engines.installed_build import build_problem
from tests.messages import says


def pretend(monkeypatch: pytest.MonkeyPatch, *, cuda: str | None, vllm: str | None) -> None:
    def version(name: str) -> str:
        if vllm is None:
            raise installed_build.PackageNotFoundError(name)
        return vllm

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(installed_build, "version", version)


@pytest.mark.parametrize(
    ("device", "cuda", "vllm"),
    [("cpu", None, None), ("cuda", "13.0", "0.32.0"), ("cpu", "13.0", None), ("cpu", "13.0", "0.32.0+cpu")],
)
def test_a_build_that_fits(monkeypatch: pytest.MonkeyPatch, device: str, cuda: str | None, vllm: str | None) -> None:
    pretend(monkeypatch, cuda=cuda, vllm=vllm)
    assert build_problem(device) == ""


def test_gpus_with_the_build_for_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda=None, vllm=None)
    told = build_problem("cuda")
    says(told, torch.__version__, "make setup DEVICE=gpu", "trainer.n_gpus_per_node=0")


def test_cpu_with_the_build_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda="13.0", vllm="0.32.0")
    told = build_problem("cpu")
    says(told, "CUDA 13.0", "cluster=single_gpu", "make setup DEVICE=cpu")
