"""Actor, critic and teacher on real ranks: the same numbers however the work is cut, and resumed bit for bit."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.algorithms import kl_penalty
from grpo_dist.algorithms.settings import ObjectiveSettings
from grpo_dist.engines.settings import PassLimits
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.plan import make_plan
from grpo_dist.protocol import DataProto, Ragged, metric_values
from grpo_dist.protocol.sequences import TEACHER_PROMPTS, as_teacher_reads
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.event_loop import run
from grpo_dist.workers.actor import ActorGroup, ActorWorker
from grpo_dist.workers.gang import Gang, PolicyWorker, ReferenceGroup, TrainedGroup, TrainedWorker
from tests.engines.train.plain import causal_lm, log_probs_alone, response_logits
from tests.models import VOCAB, objective, random_batch, random_model
from tests.processes import spawned, start_together
from tests.worker_settings import changed_sizes, lora, model_settings, policy_settings

pytestmark = [pytest.mark.ray, pytest.mark.deep]

STEPS, ROWS = 4, 16
SEQUENCES = ("uid", "prompts", "responses", "response_mask")


def stored_batch(*columns: str) -> DataProtoRef:
    """16 rows of 4 groups, as the driver has them."""
    data = random_batch(num_groups=4, n=4).select(columns)
    handle = DataProtoRef.put(data)
    lengths = {f"{name}_length": data[f"{name}s"].lengths.numpy() for name in ("prompt", "response")}
    return DataProtoRef(handle.frames, handle.small | lengths, len(data))


def per_token(name: str, rows: list[torch.Tensor]) -> DataProtoRef:
    return DataProtoRef.put(DataProto.from_dict({name: Ragged.from_rows(rows, torch.float32)}))


def save(gang: Gang, folder: Path) -> str:
    run(gang.begin_save(str(folder)))
    run(gang.finished_save(wait=True))
    return str(folder)


def assert_a_stop_changes_no_bit(
    gang: Gang, start: str, folder: Path, train: Callable[[range], list[Any]], whole: list[Any]
) -> None:
    """From its start on, with a stop in the middle and a step that is forgotten, it has the numbers of the whole."""
    run(gang.load_checkpoint(start))
    first = train(range(2))
    half = save(gang, folder)
    train(range(1))  # as if it had gone on
    run(gang.load_checkpoint(half))
    assert [*first, *train(range(2, STEPS))] == whole


def test_an_actor_with_lora_is_its_own_reference(local_ray: None, random_models: dict[str, str]) -> None:
    """The reference stays what it was while the policy moves; on policy the update returns the old log-probs."""
    own = {"update": PassLimits("actor_rollout_ref.actor.ppo_", 4), "reference_columns": ("ref_log_probs",)}
    on_policy = [name for name in random_batch(num_groups=1, n=1).columns() if name != "old_log_probs"]
    batch = stored_batch(*on_policy)
    with spawned("actor", ActorWorker, [(0, 2), (1, 2)]) as workers:
        actor = ActorGroup(workers)
        run(actor.start(policy_settings(model_settings(random_models["tied"], lora=lora()), **own)))

        def log_probs(method: str) -> np.ndarray:
            found = run(actor.compute_log_probs("test", batch, method))
            return found.fetch(found.columns)[found.columns[0]].values.numpy()

        before, reference = log_probs("compute_log_probs"), log_probs("compute_reference")
        np.testing.assert_allclose(before, reference, atol=1e-6)  # the factors start without effect
        trained, metrics = run(actor.update(batch, [np.arange(16)], objective(on_policy=True), 1))
        old = trained.fetch(("old_log_probs",))["old_log_probs"].values.numpy()
        np.testing.assert_allclose(old, before, atol=1e-5)
        assert metrics["actor/grad_norm"].value > 0
        np.testing.assert_allclose(log_probs("compute_reference"), reference, atol=1e-6)
        assert np.abs(log_probs("compute_log_probs") - old).max() > 1e-3


# --- a critic ------------------------------
@pytest.fixture(scope="module")
def critics(local_ray: None, random_models: dict[str, str]) -> Iterator[dict[str, TrainedGroup]]:
    """On one rank with passes of 16 sequences, on two ranks with passes of 3, and on two that split these."""
    path = f"critic.model.path={random_models['tied']}"
    config, _ = load_config(["recipe=ppo", path, "critic.optim.lr=1e-3"])
    plain = make_plan(config, STEPS).ranks("critic")
    with ExitStack() as stack:
        groups = {}
        for name, ranks, size in (("one", 1, 16), ("two", 2, 3), ("split", 2, 3)):
            workers = stack.enter_context(spawned("critic", TrainedWorker, [(rank, ranks) for rank in range(ranks)]))
            groups[name] = TrainedGroup(workers)
            model = replace(plain.model, sequence_parallel_size=2 if name == "split" else 1)
            settings = changed_sizes(plain, model=model, forward=size, update=size)
            run(groups[name].start(settings))
        yield groups


def criticised(critic: TrainedGroup, steps: range) -> list[tuple[list[float], dict[str, float]]]:
    """Its values and metrics, step by step: twice over the batch, in mini-batches of whole groups."""
    config, _ = load_config(["recipe=ppo"])
    found, batch = [], stored_batch(*SEQUENCES)
    lengths = enumerate(batch["response_length"].tolist())
    returns = per_token("returns", [torch.linspace(-1, 2, int(length)) + 0.1 * i for i, length in lengths])
    mini_batches = [np.arange(8), np.arange(8, ROWS)] * 2
    for step in steps:
        with_values = batch.union(run(critic.compute_log_probs("values", batch)))
        values = with_values.fetch(("values",))["values"].values
        settings = make_plan(config).value_objective
        updated, metrics = run(critic.update(with_values.union(returns), mini_batches, settings, step + 1))
        assert "old_log_probs" not in updated.columns
        found.append((values.tolist(), metric_values(metrics)))
    return found


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    for (values, row), (other_values, other_row) in zip(found, expected, strict=True):
        np.testing.assert_allclose(values, other_values, atol=1e-4)
        assert row == pytest.approx(other_row, rel=1e-3, abs=1e-4)


def test_a_critic_trains_the_same_on_any_ranks_and_a_stop_changes_no_bit(
    critics: dict[str, TrainedGroup], tmp_path: Path
) -> None:
    start = save(critics["two"], tmp_path / "start")
    one, two, split = (criticised(critic, range(STEPS)) for critic in critics.values())
    (before, first), (after, last) = one[0], one[-1]
    assert np.abs(before).max() < 0.5, "a new head says little"
    assert np.abs(np.subtract(after, before)).max() > 0.1, "and learns"
    assert last["critic/vf_loss"] < first["critic/vf_loss"]
    assert {"critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm", "critic/lr"} <= first.keys()
    assert_alike(two, one)
    assert_alike(split, one)
    half = tmp_path / "half"
    assert_a_stop_changes_no_bit(critics["two"], start, half, lambda steps: criticised(critics["two"], steps), two)
    run(critics["split"].load_checkpoint(str(half)))
    assert_alike(criticised(critics["split"], range(2, STEPS)), two[2:])


def test_of_ranks_that_split_sequences_one_returns_the_values(critics: dict[str, TrainedGroup]) -> None:
    workers, rows = critics["split"].workers, stored_batch(*SEQUENCES)
    calls = [workers.submit_for_data(rank, "values", "compute_log_probs", rows) for rank in range(2)]
    assert [(label.columns, label.num_rows) for label in run(workers.answers(calls))] == [(("values",), ROWS), ((), 0)]


# --- a teacher of another size ------------------------------
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


def taught_steps(groups: Taught, objective: ObjectiveSettings, steps: range) -> list[dict[str, float]]:
    """The metrics of each step, in which advantages are 0."""
    (actor, ref), found = groups, []
    for step in steps:
        batch = stored_batch(*SEQUENCES)
        batch = batch.union(per_token("advantages", [torch.zeros(int(k)) for k in batch["response_length"]]))
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
def test_a_policy_is_taught_the_same_on_any_ranks_and_a_stop_changes_no_bit(
    taught: dict[str, Taught], random_models: dict[str, str], teacher: str, name: str, tmp_path: Path
) -> None:
    objective = make_plan(load_config(overrides(random_models["tied"], teacher, name))[0]).objective
    starts = {key: save(actor, tmp_path / key) for key, (actor, _) in taught.items()}
    one, two = (taught_steps(groups, objective, range(STEPS)) for groups in taught.values())
    assert one[0]["actor/kl_loss"] == pytest.approx(plain_kl(random_models["tied"], teacher, name), rel=1e-4)
    assert one[-1]["actor/kl_loss"] < 0.9 * one[0]["actor/kl_loss"], "it learns"
    for row, other in zip(one, two, strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-4)

    def train(steps: range) -> list[dict[str, float]]:
        return taught_steps(taught["two"], objective, steps)

    assert_a_stop_changes_no_bit(taught["two"][0], starts["two"], tmp_path / "half", train, two)
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
