"""What the columns of a batch are, and how metrics of parts become those of the whole."""

import pickle

import pytest

from grpo_dist.algorithms.settings import LabelSettings, PreferenceSettings, ValueSettings
from grpo_dist.errors import BatchError
from grpo_dist.protocol import Max, Mean, Sum, merge_metrics, metric_values
from grpo_dist.protocol.fields import FIELDS, columns_for, require
from tests.messages import refuses

READERS = {
    *("forward", "router", "teacher", "actor", "critic", "reward_model", "scorer", "endpoint", "targets"),
    *("diagnostics", "samples", "judged", "driver"),
}


def test_a_missing_column_is_named_with_its_maker() -> None:
    require("update", ["prompts", "responses", "uid"], ["responses"])
    require("update", [], [])
    with refuses(BatchError, "'update'", "'old_log_probs'", "actor", "'ref_log_probs'", "ref", "prompts, responses"):
        require("update", ["responses", "prompts"], ["responses", "old_log_probs", "ref_log_probs"])
    with refuses(BatchError, "'score'", "'responses'", "no columns"):
        require("score", [], ["responses"])
    with refuses(BatchError, "'score'", "'reward_extra/acc'"):  # outside the contract
        require("score", ["responses"], ["reward_extra/acc"])


def test_readers_of_fields_are_known_and_the_driver_reads_small_ones_alone() -> None:
    for name, field in FIELDS.items():
        assert set(field.read_by.split()) <= READERS, name
        assert "driver" not in field.read_by or field.shape == "(N,)", name


def test_a_reader_gets_of_the_columns_that_are_there_those_that_it_reads() -> None:
    there = ["score", "prompts", "responses", "routes", "predecessors", "mine", "values"]
    assert columns_for(there, "forward") == ("prompts", "responses", "predecessors")
    assert columns_for(there, "forward", "router") == ("prompts", "responses", "routes", "predecessors")
    assert columns_for(there, "teacher") == columns_for([], "forward") == ()


def test_each_column_of_an_objective_names_it_as_a_reader() -> None:
    assert columns_for(ValueSettings.columns, "critic") == ValueSettings.columns
    for settings in (LabelSettings, PreferenceSettings):
        assert columns_for(settings.columns, "reward_model") == settings.columns


# --- metrics -----------------------------------------------------------------------------------------------------
def test_metrics_of_parts() -> None:
    """A mean is weighted: 3 tokens of mean 1 and 1 token of 9 have 12 / 4, not 5; of nothing it is neutral."""
    assert Mean(3.0, 3).merge(Mean(9.0, 1)).value == 3.0
    assert Mean(0.0, 0).value == 0.0
    assert Mean(0.0, 0).merge(Mean(8.0, 2)).value == 4.0
    assert metric_values({"a": Mean(0.0, 0), "b": Sum(0.0), "c": Mean(0.0, 1)}) == {"b": 0.0, "c": 0.0}, "no number"
    assert Sum(2.0).merge(Sum(-0.5)).value == 1.5
    assert [Max(a).merge(Max(b)).value for a, b in ((2.0, -7.0), (-7.0, -2.0))] == [2.0, -2.0]
    assert pickle.loads(pickle.dumps({"a": Mean(1.0, 2), "b": Max(1.0)})) == {"a": Mean(1.0, 2), "b": Max(1.0)}


def test_merge_by_name_in_any_order() -> None:
    parts = [{"a": Mean(1.0, 1), "loss": Sum(1.0)}, {"a": Mean(6.0, 2)}, {"b": Max(3.0), "loss": Sum(2.0)}]
    expected = {"a": 7 / 3, "loss": 3.0, "b": 3.0}
    assert metric_values(merge_metrics(parts)) == pytest.approx(expected)
    assert metric_values(merge_metrics(reversed(parts))) == pytest.approx(expected)
    assert metric_values(merge_metrics([])) == {}
    assert parts[0] == {"a": Mean(1.0, 1), "loss": Sum(1.0)}, "the parts are as they were"
    with pytest.raises(AttributeError):  # kinds do not mix
        merge_metrics([{"a": Mean(1.0, 1)}, {"a": Sum(1.0)}])
