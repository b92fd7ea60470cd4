"""What the probe measures: every phase of every size, in positive numbers; how fast does not matter here."""

from __future__ import annotations

from pathlib import Path

from grpo_dist.cli import calibrate, probe
from grpo_dist.config.model_shape import model_config_at_hand, model_shape
from tests.ranks import run_ranks


def test_the_matrices_are_those_that_are_counted(tmp_path: Path) -> None:
    for sizes in {*probe.TRAINED["cpu"], *probe.SAMPLED["cpu"]}:
        path = probe._model(str(tmp_path), sizes)
        shape = model_shape(model_config_at_hand(path) or {})
        assert shape is not None
        point = dict(zip(("hidden", "layers", "vocabulary"), sizes, strict=True))
        assert calibrate._matrices(point) == (shape.num_layers * shape.active, shape.matrix)
        assert calibrate._widths(point) == (shape.query_width, shape.key_width)


def test_exchanges_of_two_ranks() -> None:
    found = probe.exchanges()
    assert [point["bytes"] for point in found] == list(probe.EXCHANGES)
    assert all(point["seconds"] > 0 for point in found)


def _passes(rank: int, path: str) -> list[dict[str, float]]:
    return list(probe.passes(path, "cpu", "fp32"))


def test_forward_passes_and_updates(tmp_path: Path) -> None:
    path = probe._model(str(tmp_path), (64, 2, 256))
    (found,) = run_ranks(1, _passes, path)
    assert [(p["prompts"], p["sequences"] // p["prompts"], p["prompt"], p["response"]) for p in found] == [
        *probe.PASSES
    ]
    assert all(point["forward"] > 0 and point["update"] > 0 for point in found)
