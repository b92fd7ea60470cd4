"""A teacher of another size on real ranks: the same losses however the work is cut, and resumed bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

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
from tests.models import VOCAB, random_batch, random_model
from tests.processes import spawned, start_together
from tests.worker_settings import changed_sizes

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


def stored_batch() -> DataProtoRef:
    """16 rows of 4 groups whose advantages are 0."""
    data = random_batch(num_groups=4, n=4).select(["uid", "prompts", "responses", "response_mask"])
    lengths = data["responses"].lengths
    nothing = Ragged.from_rows([torch.zeros(int(length)) for length in lengths], torch.float32)
    data = data.union(DataProto.from_dict({"advantages": nothing}))
    handle = DataProtoRef.put(data)
    small = {f"{name}_length": data[f"{name}s"].lengths.numpy() for name in ("prompt", "response")}
    return DataProtoRef(handle.frames, handle.small | small, len(data))


def trained(groups: Taught, objective: ObjectiveSettings, steps: range) -> list[dict[str, float]]:
    """The metrics of each step."""
    actor, ref = groups
    found = []
    for step in steps:
        batch = stored_batch()
        batch = batch.union(run(ref.compute_log_probs("ref_log_prob", batch)))
        _, metrics = run(actor.update(batch, [np.arange(ROWS)], objective, step + 1))
        found.append(metric_values(metrics))
    return found


def save(actor: ActorGroup, folder: Path) -> str:
    run(actor.begin_save(str(folder)))
    run(actor.finished_save(wait=True))
    return str(folder)


def plain_kl(policy: str, teacher: str, name: str) -> float:
    """The mean over the tokens, from the logits of transformers' own models."""
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (policy, teacher)
    ]
    data, values = random_batch(num_groups=4, n=4), []
    for prompt, response in zip(data["prompts"].rows(), data["responses"].rows(), strict=True):
        ids = torch.cat([prompt, response]).long().unsqueeze(0)
        with torch.no_grad():
            logits = [model(input_ids=ids).logits[0, len(prompt) - 1 : -1] for model in models]
        if name == "full":  # among the policy's tokens
            values.append(kl_penalty("full", *(each[:, :VOCAB] for each in logits)))
        else:
            sampled = response.long().unsqueeze(1)
            values.append(kl_penalty(name, *(torch.log_softmax(z, -1).gather(1, sampled)[:, 0] for z in logits)))
    return torch.cat(values).mean().item()


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
    batch = stored_batch()
    data = batch.fetch(("uid", "prompts", "responses", "response_mask"))
    shown = [row.flip(0) if i % 2 else row[:0] for i, row in enumerate(data["prompts"].rows())]
    handle = DataProtoRef.put(DataProto.from_dict({TEACHER_PROMPTS: Ragged.from_rows(shown, torch.int32)}))
    read = DataProtoRef.put(as_teacher_reads(data.union(handle.fetch((TEACHER_PROMPTS,)))))
    behind = DataProtoRef(read.frames, batch.small, len(batch))
    for actor, ref in taught.values():
        for gang, stage, expected in ((ref, "ref_log_prob", behind), (actor, "old_log_prob", batch)):
            needs = (TEACHER_PROMPTS,) if gang is ref else ()
            found = run(gang.compute_log_probs(stage, batch.union(handle), needs=needs))
            wanted = run(gang.compute_log_probs(stage, expected))
            column = "ref_log_probs" if gang is ref else "old_log_probs"
            values, right = (each.fetch((column,))[column].values for each in (found, wanted))
            torch.testing.assert_close(values, right, rtol=1e-4, atol=1e-5)
    plain = run(ref.compute_log_probs("ref_log_prob", batch)).fetch(("ref_log_probs",))["ref_log_probs"].values
    seen = run(ref.compute_log_probs("ref_log_prob", batch.union(handle), needs=(TEACHER_PROMPTS,)))
    seen = seen.fetch(("ref_log_probs",))["ref_log_probs"]
    assert (plain - seen.values).abs().max() > 0.1


def test_each_row_has_its_own_teachers_log_probs(local_ray: None, random_models: dict[str, str], teacher: str) -> None:
    """On two ranks: the second teacher is of another family, and one rank may have no row of it."""
    paths = {"a": random_models["tied"], "b/c": teacher}
    named = ", ".join(f"{source}: {path}" for source, path in paths.items())
    config, _ = load_config(
        [*overrides(random_models["tied"], "x", "k2"), f"actor_rollout_ref.ref.model.path={{{named}}}"]
    )
    settings = changed_sizes(make_plan(config, STEPS).ranks("ref"), forward=3)
    assert [each.path for each in (settings.model, *settings.teachers)] == list(paths.values())
    batch = stored_batch()
    number = np.array([1, 0, 0, 1] + [0] * (ROWS - 4))
    with spawned("ref", PolicyWorker, [(0, 2), (1, 2)]) as workers:
        ref = ReferenceGroup(workers)
        start_together(ref.start(settings))
        of_rows = DataProtoRef(batch.frames, batch.small | {"teacher": number}, ROWS)
        found = run(ref.compute_log_probs("ref_log_prob", of_rows)).fetch(("ref_log_probs",))["ref_log_probs"].rows()
    data = batch.fetch(("prompts", "responses"))
    models = [transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths.values()]
    for i, (prompt, response) in enumerate(zip(data["prompts"].rows(), data["responses"].rows(), strict=True)):
        ids, sampled = torch.cat([prompt, response]).long().unsqueeze(0), response.long().unsqueeze(1)
        with torch.no_grad():
            logits = [model(input_ids=ids).logits[0, len(prompt) - 1 : -1] for model in models]
        own, other = (
            torch.log_softmax(z, -1).gather(1, sampled)[:, 0] for z in (logits[number[i]], logits[1 - number[i]])
        )
        torch.testing.assert_close(found[i], own, rtol=1e-4, atol=1e-4)
        assert (own - other).abs().max() > 0.01
