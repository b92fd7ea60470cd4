"""A teacher of another size on real ranks: the same losses however the work is cut, and resumed bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.algorithms import kl_penalty
from grpo_dist.algorithms.settings import ObjectiveSettings
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.plan import make_plan
from grpo_dist.protocol import DataProto, Ragged, metric_values
from grpo_dist.protocol.sequences import TEACHER_PROMPTS, as_teacher_reads
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.event_loop import run
from grpo_dist.workers.actor import ActorGroup, ActorWorker
from grpo_dist.workers.gang import PolicyWorker, ReferenceGroup
from tests.engines.train.plain import causal_lm, log_probs_alone, response_logits
from tests.models import VOCAB, random_batch, random_model
from tests.processes import spawned, start_together
from tests.worker_settings import changed_sizes
from tests.workers.test_actor import SEQUENCES, save, stored_batch

pytestmark = [pytest.mark.ray, pytest.mark.deep]

STEPS, ROWS = 4, 16
Taught = tuple[ActorGroup, ReferenceGroup]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of another family, deeper and wider than the policy, with an output layer of its own and rows of padding."""
    folder = tmp_path_factory.mktemp("teacher")
    return random_model(
        "Llama", folder, hidden_size=48, num_hidden_layers=3, vocab_size=VOCAB + 8, tie_word_embeddings=False
    )


def overrides(policy: str, teacher: str, kl_loss_type: str) -> list[str]:
    paths = [f"actor_rollout_ref.model.path={policy}", f"actor_rollout_ref.ref.model.path={teacher}"]
    actor = "actor_rollout_ref.actor"
    exact = [f"{actor}.fsdp_config.dtype=fp32", "actor_rollout_ref.ref.fsdp_config.dtype=fp32"]  # on any processor
    return ["recipe=distill", *paths, *exact, f"{actor}.kl_loss_type={kl_loss_type}", f"{actor}.optim.lr=1e-3"]


@pytest.fixture(scope="module")
def taught(local_ray: None, random_models: dict[str, str], teacher: str) -> Iterator[dict[str, Taught]]:
    """On one rank of each with passes of 16 sequences, and on two ranks of each with passes of 3."""
    config, _ = load_config(overrides(random_models["tied"], teacher, "full"))
    plan, found = make_plan(config, STEPS), {}
    with ExitStack() as stack:
        for name, ranks, size in (("one", 1, 16), ("two", 2, 3)):
            args = [(rank, ranks) for rank in range(ranks)]
            actor = ActorGroup(stack.enter_context(spawned("actor", ActorWorker, args)))
            ref = ReferenceGroup(stack.enter_context(spawned("ref", PolicyWorker, args)))
            columns = ("ref_log_probs", "ref_hidden_states")
            policy = changed_sizes(plan.ranks("actor"), update=size)
            reference = changed_sizes(plan.ranks("ref"), columns=columns, forward=size)
            start_together(actor.start(policy), ref.start(reference))
            run(actor.take_reference_head(ref))
            found[name] = actor, ref
        yield found


def trained(groups: Taught, objective: ObjectiveSettings, steps: range) -> list[dict[str, float]]:
    """The metrics of each step, in which advantages are 0."""
    actor, ref = groups
    found = []
    for step in steps:
        batch = stored_batch(*SEQUENCES)
        nothing = [torch.zeros(int(length)) for length in batch["response_length"]]
        advantages = DataProto.from_dict({"advantages": Ragged.from_rows(nothing, torch.float32)})
        batch = batch.union(DataProtoRef.put(advantages))
        batch = batch.union(run(ref.compute_log_probs("ref_log_prob", batch)))
        _, metrics = run(actor.update(batch, [np.arange(ROWS)], objective, step + 1))
        found.append(metric_values(metrics))
    return found


def plain_kl(policy: str, teacher: str, name: str) -> float:
    """The mean over the tokens, from the logits of transformers' own models; `full`: among the policy's tokens."""
    models, data = [causal_lm(path) for path in (policy, teacher)], random_batch(num_groups=4, n=4)
    of_rows = response_logits if name == "full" else log_probs_alone
    with torch.no_grad():
        values = [torch.cat(of_rows(model, data)) for model in models]
    return kl_penalty(name, *(each[:, :VOCAB] if name == "full" else each for each in values)).mean().item()


@pytest.mark.parametrize("name", ["full", "k3"])
def test_ranks_and_passes_change_nothing_and_a_stop_changes_no_bit(
    taught: dict[str, Taught], random_models: dict[str, str], teacher: str, name: str, tmp_path: Path
) -> None:
    objective = make_plan(load_config(overrides(random_models["tied"], teacher, name))[0]).objective
    starts = {key: save(actor, tmp_path / key) for key, (actor, _) in taught.items()}
    one, two = (trained(groups, objective, range(STEPS)) for groups in taught.values())
    assert one[0]["actor/kl_loss"] == pytest.approx(plain_kl(random_models["tied"], teacher, name), rel=1e-4)
    assert one[-1]["actor/kl_loss"] < 0.9 * one[0]["actor/kl_loss"], "it learns"
    for row, other in zip(one, two, strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-4)

    actor, _ = taught["two"]
    run(actor.load_checkpoint(starts["two"]))
    first = trained(taught["two"], objective, range(2))
    half = save(actor, tmp_path / "half")
    trained(taught["two"], objective, range(1))  # as if it had gone on
    run(actor.load_checkpoint(half))
    assert [*first, *trained(taught["two"], objective, range(2, STEPS))] == two
    for key, (each, _) in taught.items():
        run(each.load_checkpoint(starts[key]))


def test_the_reference_alone_reads_the_prompts_of_a_teacher(taught: dict[str, Taught]) -> None:
    """On one rank and on two; the actor's log-probs are those of the row's own prompt."""
    batch = stored_batch(*SEQUENCES)
    data = batch.fetch(SEQUENCES)
    shown = [row.flip(0) if i % 2 else row[:0] for i, row in enumerate(data["prompts"].rows())]
    of_teacher = DataProto.from_dict({TEACHER_PROMPTS: Ragged.from_rows(shown, torch.int32)})
    read = DataProtoRef.put(as_teacher_reads(data.union(of_teacher)))
    both, behind = batch.union(DataProtoRef.put(of_teacher)), DataProtoRef(read.frames, batch.small, len(batch))

    def values(gang: Any, batch: DataProtoRef, *needs: str) -> torch.Tensor:
        found = run(gang.compute_log_probs("ref_log_prob", batch, needs=needs))
        (name,) = (each for each in found.columns if each.endswith("log_probs"))
        return found.fetch((name,))[name].values

    for actor, ref in taught.values():
        seen = values(ref, both, TEACHER_PROMPTS)
        torch.testing.assert_close(seen, values(ref, behind), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values(actor, both), values(actor, batch), rtol=1e-4, atol=1e-5)
        assert (values(ref, batch) - seen).abs().max() > 0.1


def test_each_row_has_its_own_teachers_log_probs(local_ray: None, random_models: dict[str, str], teacher: str) -> None:
    """On two ranks: the second teacher is of another family, and one rank may have no row of it."""
    paths = {"a": random_models["tied"], "b/c": teacher}
    named = ", ".join(f"{source}: {path}" for source, path in paths.items())
    several = f"actor_rollout_ref.ref.model.path={{{named}}}"
    config, _ = load_config([*overrides(random_models["tied"], "x", "k2"), several])
    settings = changed_sizes(make_plan(config, STEPS).ranks("ref"), forward=3)
    assert [each.path for each in (settings.model, *settings.teachers)] == list(paths.values())
    batch = stored_batch(*SEQUENCES)
    number = np.array([1, 0, 0, 1] + [0] * (ROWS - 4))
    with spawned("ref", PolicyWorker, [(0, 2), (1, 2)]) as workers:
        ref = ReferenceGroup(workers)
        run(ref.start(settings))
        of_rows = DataProtoRef(batch.frames, batch.small | {"teacher": number}, ROWS)
        found = run(ref.compute_log_probs("ref_log_prob", of_rows)).fetch(("ref_log_probs",))["ref_log_probs"].rows()
    with torch.no_grad():
        by_teacher = [log_probs_alone(causal_lm(path), random_batch(num_groups=4, n=4)) for path in paths.values()]
    for values, teacher, *of_row in zip(found, number, *by_teacher, strict=True):
        torch.testing.assert_close(values, of_row[teacher], rtol=1e-4, atol=1e-4)
        assert (of_row[0] - of_row[1]).abs().max() > 0.01
