"""A critic: a step equals one in plain PyTorch, however it is cut; its start, resume and export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.forward import PolicyForward
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.objectives import ValueObjective
from grpo_dist.errors import BatchError, TrainingDiverged
from grpo_dist.protocol import DataProto, Ragged, merge_metrics, metric_values
from tests.engines.train.test_objectives import LR, engine, own_rows, plain_model
from tests.messages import says
from tests.models import add_tokenizer, random_batch, random_classifier, random_model, scheduled
from tests.ranks import run_ranks
from tests.worker_settings import model_settings, value_settings

CLIP = 0.4
KINDS = {
    "tokens": value_settings(CLIP, "token-mean"),
    "sequences": value_settings(CLIP, "seq-mean-token-sum-norm", length=12.0),
}
UNEVEN = ([0, 1, 2, 5, 6], [3, 4, 7])
# ranks' rows, layout, and limits of a pass
CUTS: dict[str, tuple[Sequence[Sequence[int]], str, dict[str, Any]]] = {
    "padded, one pass": ([range(8)], "padded", {"limits": PassLimits("", 8)}),
    "packed, passes of 30 tokens": ([range(8)], "packed", {"limits": PassLimits("", 1, 30)}),
    "shared, passes of one sequence": ([range(8)], "shared", {"limits": PassLimits("", 1)}),
    "two ranks, shared": (UNEVEN, "shared", {"limits": PassLimits("", 3)}),
    "two ranks, one without rows": ([range(8), []], "packed", {"limits": PassLimits("", 3)}),
}


def plain_values(model: Any, data: DataProto) -> list[torch.Tensor]:
    """The values of each row's response tokens, read at the token before, each sequence alone."""
    rows = zip(data["prompts"].rows(), data["responses"].rows(), strict=True)
    return [model(input_ids=torch.cat(row).long()[None]).logits[0, len(row[0]) - 1 : -1, 0] for row in rows]


def rows_for(path: str) -> DataProto:
    """Old values are off the model's by more than the clip range; a row is masked whole, others have gaps."""
    data = random_batch(num_groups=4, n=2, seed=5)
    rng = np.random.default_rng(6)
    with torch.no_grad():
        found = [row.numpy() for row in plain_values(plain_model(path), data)]
    old = [row + rng.normal(scale=3 * CLIP, size=len(row)) for row in found]
    returns = [row + rng.normal(scale=CLIP, size=len(row)) for row in found]
    masks = [rng.random(len(row)) > 0.3 for row in found]
    masks[3][:] = False
    columns = {"values": Ragged.from_rows(old, torch.float32), "returns": Ragged.from_rows(returns, torch.float32)}
    columns["response_mask"] = Ragged.from_rows(masks, torch.int8)
    return DataProto({**data.batch, **columns}, data.non_tensor_batch)


def plain_step(path: str, data: DataProto, kind: str) -> dict[str, Any]:
    """The sum over the tokens that train by their number, or by 12 and the sequences with one; a step of SGD."""
    model = plain_model(path)
    losses, clipped, seen = [], [], []
    columns = (data[name].rows() for name in ("values", "returns", "response_mask"))
    for row, old, returns, mask in zip(plain_values(model, data), *columns, strict=True):
        near = old + (row - old).clamp(-CLIP, CLIP)
        errors = torch.stack([(row - returns) ** 2, (near - returns) ** 2])[:, mask > 0]
        losses.append(errors.max(0).values / 2)
        clipped.append(errors[1] > errors[0])
        seen.append(row.detach()[mask > 0])
    tokens = torch.cat(losses)
    loss = tokens.sum() / {"tokens": len(tokens), "sequences": 12 * sum(len(row) > 0 for row in losses)}[kind]
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    metrics = {"vf_loss": loss.item(), "vf_clipfrac": torch.cat(clipped).float().mean().item()}
    metrics |= {"vpred_mean": torch.cat(seen).mean().item(), "grad_norm": norm, "lr": LR, "skipped_updates": 0.0}
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    return {"metrics": {f"critic/{name}": value for name, value in metrics.items()}, "weights": weights}


def weights_of(made: FSDPEngine) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in made.full_parameters("float32")}


def train(rank: int, path: str, data: DataProto, cuts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """One step of each kind in each cut."""
    out = {}
    for cut, (shards, layout, limits) in cuts.items():
        for kind, objective in KINDS.items():
            made = engine(path, layout)
            result = made.train_mini_batch(own_rows(data, shards, rank), objective=objective, **limits)
            out[f"{kind}, {cut}"] = {
                "metrics": result.metrics,
                "weights": weights_of(made),
                "report": made.forward.report,
            }
    return out


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def data(path: str) -> DataProto:
    return rows_for(path)


@pytest.fixture(scope="module")
def runs(path: str, data: DataProto) -> dict[str, list[dict[str, Any]]]:
    """By kind and cut: what each rank has."""
    found: dict[str, list[dict[str, Any]]] = {}
    for size in (1, 2):
        ranks = run_ranks(size, train, path, data, {name: cut for name, cut in CUTS.items() if len(cut[0]) == size})
        found |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return found


@pytest.fixture(scope="module")
def expected(path: str, data: DataProto) -> dict[str, Any]:
    with torch.enable_grad():
        return {kind: plain_step(path, data, kind) for kind in KINDS}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("cut", list(CUTS))
def test_a_step_equals_plain_pytorch(runs: dict[str, Any], expected: dict[str, Any], kind: str, cut: str) -> None:
    ranks = runs[f"{kind}, {cut}"]
    metrics = metric_values(merge_metrics([rank["metrics"] for rank in ranks]))
    assert metrics == pytest.approx(expected[kind]["metrics"], rel=5e-5, abs=1e-6)
    for rank in ranks:
        for name, weight in expected[kind]["weights"].items():
            np.testing.assert_allclose(rank["weights"][name], weight, rtol=1e-4, atol=1e-5, err_msg=name)
        assert CUTS[cut][1][:4] in rank["report"], "in the layout that was asked for"
        assert "instead" not in rank["report"]


def test_the_steps_prove_something(expected: dict[str, Any], path: str) -> None:
    """The clip decides for some tokens, not for all; every weight moves, and in each aggregation to another place."""
    before = dict(plain_model(path).named_parameters())
    one, other = (step["weights"]["score.weight"] for step in expected.values())
    assert all(0.2 < step["metrics"]["critic/vf_clipfrac"] < 0.9 for step in expected.values())
    assert np.abs(one - other).max() > 1e-3
    for step in expected.values():
        for name, weight in step["weights"].items():
            assert np.abs(weight - before[name].detach().numpy()).max() > 1e-5, name


# --- what one step does --------------------------------------------------------------------------------------------
def odd_steps(rank: int, path: str, data: DataProto) -> dict[str, Any]:
    """Metrics of three steps, and whether the weights moved; then the errors of data that cannot be trained on."""
    made, out = engine(path), {}
    found = made.compute_columns(data, ("values",), PassLimits("", 8))["values"]
    everything = Ragged(torch.ones_like(data["response_mask"].values), found.offsets)
    before = weights_of(made)
    for name, old, target, mask in (
        ("clipped", -10.0, 1.0, everything),
        ("away", 10.0, -1.0, everything),
        ("masked", 0.0, 1.0, Ragged(everything.values * 0, found.offsets)),
    ):
        columns = {"values": Ragged(found.values + old, found.offsets), "response_mask": mask}
        columns["returns"] = Ragged(found.values + target, found.offsets)
        rows = DataProto({**data.batch, **columns}, data.non_tensor_batch)
        out[name] = metric_values(made.train_mini_batch(rows, KINDS["tokens"], PassLimits("", 8)).metrics)
    out["moved"] = max(np.abs(weight - before[name]).max() for name, weight in weights_of(made).items())
    bad = Ragged(torch.full_like(found.values, float("inf")), found.offsets)
    for name, column in (("nan", {"returns": bad}), ("missing", {})):
        names = ("prompts", "responses", "response_mask", "values", "uid")
        rows = data.select(names)
        rows = DataProto({**rows.batch, **column}, rows.non_tensor_batch)
        try:
            made.train_mini_batch(rows, KINDS["tokens"], PassLimits("", 8))
        except (BatchError, TrainingDiverged) as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out


def test_steps_worked_out_on_paper(path: str, data: DataProto) -> None:
    """Values 10 away from the old ones, on the side of their returns 1 further on: the error that counts is of
    10 - 0.4 + 1, and it has no gradient. Without a token that trains no step is taken.
    """
    (found,) = run_ranks(1, odd_steps, path, data)
    for name in ("clipped", "away"):
        assert found[name]["critic/vf_loss"] == pytest.approx(10.6**2 / 2, rel=1e-4)
        assert (found[name]["critic/vf_clipfrac"], found[name]["critic/grad_norm"]) == (1, 0)
    quiet = {
        name: found["masked"].get(f"critic/{name}") for name in ("vf_loss", "grad_norm", "vf_clipfrac", "vpred_mean")
    }
    assert list(quiet.values()) == [0, 0, None, None], "means over no tokens are no metrics"
    assert found["masked"]["critic/skipped_updates"] == 1
    assert found["moved"] == 0
    says(found["nan"], "TrainingDiverged", "loss inf", "p0", "not taken")
    says(found["missing"], "BatchError", "'returns'")


def test_an_objective_for_a_model_with_a_head() -> None:
    with pytest.raises(AssertionError):
        ValueObjective(KINDS["tokens"], object.__new__(PolicyForward), None)


# --- from start to export ------------------------------------------------------------------------------------------
def critic(path: str, layout: str = "shared") -> FSDPEngine:
    model = model_settings(path, layout=layout, num_labels=1, new_head_seed=7)
    optimizer = scheduled(lr=1e-2, warmup=2)
    model = replace(model, small_new_head=True, key="critic.model.path")
    return FSDPEngine(model, device="cpu", temperature=1.0, optimizer=optimizer, total_steps=6, grad_clip=1.0)


def stop_and_go_on(rank: int, path: str, data: DataProto, folder: Path) -> dict[str, Any]:
    """A critic's first values; weights after two steps, and after one, a stop and another; values of the export."""

    def step(made: FSDPEngine) -> None:
        own = data.index(np.arange(len(data))[rank :: torch.distributed.get_world_size()])
        made.train_mini_batch(own, KINDS["tokens"], PassLimits("", 2))

    def values(made: FSDPEngine) -> list[list[float]]:
        return [row.tolist() for row in made.compute_columns(data, ("values",), PassLimits("", 4))["values"].rows()]

    made = critic(path)
    first = values(made)
    step(made)
    made.begin_save(folder / "checkpoint")
    made.finished_save(wait=True)
    step(made)
    again = critic(path)
    again.load_checkpoint(folder / "checkpoint")
    step(again)
    made.export_hf_model(folder / "export", "fp32")
    found = {"first": first, "last": values(made), "exported": values(critic(str(folder / "export")))}
    return found | {"weights": weights_of(made), "resumed": weights_of(again)}


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "ranks"), [("policy", 2), ("reward model", 1)])
def test_from_start_to_export(kind: str, ranks: int, data: DataProto, tmp_path: Path) -> None:
    """A policy gets a small new head; the head of a reward model is kept, also by a critic that may draw a new one."""
    source = tmp_path / "source"
    path = random_model("Qwen3", source, head_dim=8) if kind == "policy" else random_classifier(source)
    found, *others = run_ranks(ranks, stop_and_go_on, add_tokenizer(path), data, tmp_path)
    assert all(other["last"] == found["last"] for other in others)
    for name, weight in found["weights"].items():
        np.testing.assert_array_equal(found["resumed"][name], weight, err_msg=name)
    first, last = (np.concatenate(found[name]) for name in ("first", "last"))
    assert np.abs(last - first).max() > 1e-3, "it has been trained"
    if kind == "reward model":
        with torch.no_grad():
            assert first == pytest.approx(torch.cat(plain_values(plain_model(path), data)).numpy(), abs=2e-5)
    with torch.no_grad():
        plain = torch.cat(plain_values(plain_model(str(tmp_path / "export")), data)).numpy()
    assert np.concatenate(found["exported"]) == pytest.approx(last, abs=1e-6)
    assert plain == pytest.approx(last, abs=2e-5)
