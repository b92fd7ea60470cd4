import torch

from grpo_dist.algorithms.settings import LabelSettings, PreferenceSettings, ValueSettings
from grpo_dist.errors import BatchError
from grpo_dist.protocol.fields import FIELDS, columns_for, require
from tests.messages import refuses
from tests.models import random_batch

MAKERS = {"sampler", "data", "rollout", "reward", "actor", "ref", "critic", "targets"}
READERS = {
    *("forward", "router", "teacher", "actor", "critic", "reward_model", "scorer", "endpoint", "targets"),
    *("diagnostics", "samples", "judged", "driver"),
}


def test_a_batch_that_has_the_columns_passes() -> None:
    require("update", ["prompts", "responses", "uid"], ["responses"])
    require("update", [], [])


def test_a_missing_column_is_named_with_its_maker() -> None:
    with refuses(BatchError, "'update'", "'old_log_probs'", "actor", "'ref_log_probs'", "ref", "prompts, responses"):
        require("update", ["responses", "prompts"], ["responses", "old_log_probs", "ref_log_probs"])
    with refuses(BatchError, "'score'", "'responses'", "no columns"):
        require("score", [], ["responses"])


def test_a_column_outside_the_contract_is_named_too() -> None:
    with refuses(BatchError, "'score'", "'reward_extra/acc'"):
        require("score", ["responses"], ["reward_extra/acc"])


def test_every_field_is_complete() -> None:
    for name, field in FIELDS.items():
        assert field.made_by in MAKERS, name
        assert field.meaning, name
        assert set(field.read_by.split()) <= READERS, name
        assert "driver" not in field.read_by or field.shape == "(N,)", name
        shapes = (
            "(N,)",
            "ragged (N, P_i)",
            "ragged (N, R_i)",
            "ragged (N, R_i, H)",
            "ragged (N, S_i)",
            "ragged (N, Q_i)",
            "ragged (N, R_i, K)",
        )
        assert field.shape in (*shapes, *(f"ragged (N, {row}, layers, experts)" for row in ("P_i", "R_i"))), name


def test_a_reader_gets_of_the_columns_that_are_there_those_that_it_reads() -> None:
    there = ["score", "prompts", "responses", "routes", "predecessors", "mine", "values"]
    assert columns_for(there, "forward") == ("prompts", "responses", "predecessors")
    assert columns_for(there, "forward", "router") == ("prompts", "responses", "routes", "predecessors")
    assert columns_for(there, "teacher") == columns_for([], "forward") == ()


def test_each_column_of_an_objective_names_it_as_a_reader() -> None:
    for reader, settings in (
        ("critic", ValueSettings),
        ("reward_model", LabelSettings),
        ("reward_model", PreferenceSettings),
    ):
        assert columns_for(settings.columns, reader) == settings.columns


def test_the_test_batch_follows_the_contract() -> None:
    data = random_batch(num_groups=2, n=2)
    for name, column in data.batch.items():
        assert str(column.values.dtype) == f"torch.{FIELDS[name].dtype}", name
        same = "prompts" if FIELDS[name].shape == "ragged (N, P_i)" else "responses"
        assert torch.equal(column.lengths, data[same].lengths), name
