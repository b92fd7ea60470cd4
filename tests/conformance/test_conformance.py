"""The conformance suite: its files are what the generator writes, grpo_dist agrees with them, faults are found."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from conformance import check, generate
from conformance.adapters import grpo_dist as adapter
from conformance.form import CASES, Case, Group, difference, numbers, read_all, rounded, text
from grpo_dist.algorithms.advantage import ADVANTAGE
from grpo_dist.algorithms.correction import LEVELS, REJECTIONS
from grpo_dist.algorithms.kl import KL
from grpo_dist.algorithms.policy_loss import POLICY_LOSS, clip_range
from grpo_dist.plugins.names import LOSS_AGG_MODES

GROUPS = read_all()
# Written numbers have 10 digits and more; the last ones are the processor's.
WRITTEN = 1e-8


def of(kind: str) -> list[Group]:
    return [group for group in GROUPS if group.kind == kind]


def documents(folder: Path) -> dict[str, dict]:
    return {file.name: json.loads(file.read_text()) for file in folder.glob("*.json")}


def without_expected(document: dict) -> dict:
    return {**document, "cases": [{**case, "expected": sorted(case["expected"])} for case in document["cases"]]}


def test_the_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    (tmp_path / "gone.json").write_text("{}")
    generate.write(tmp_path)
    written, kept = documents(tmp_path), documents(CASES)
    assert written.keys() == kept.keys()
    for name in kept:
        assert without_expected(written[name]) == without_expected(kept[name])
        for new, old in zip(written[name]["cases"], kept[name]["cases"], strict=True):
            for output, expected in old["expected"].items():
                assert difference(new["expected"][output], expected) < WRITTEN, (name, old["name"], output)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.file)
def test_grpo_dist_agrees(group: Group) -> None:
    results = check.check(check.answers_of(adapter), [group])
    assert {result.status for result in results} == {check.AGREES}, results


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.file)
def test_a_group_is_well_formed(group: Group) -> None:
    assert group.arxiv
    assert group.equation
    assert max(Counter(case.name for case in group.cases).values()) == 1
    for case in group.cases:
        assert case.probes
        assert case.expected
        assert all(abs(number) < 1e6 for number in numbers(list(case.expected.values())))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("advantage", ADVANTAGE.names()),
        ("policy_loss", POLICY_LOSS.names()),
        ("aggregation", LOSS_AGG_MODES),
        ("correction", [*(f"rollout_is_{level}" for level in LEVELS), *REJECTIONS]),
    ],
)
def test_every_objective_has_cases(kind: str, names: list[str]) -> None:
    """A new one needs an entry in `conformance/entries`; of KLs one name is enough."""
    assert set(names) <= {group.name for group in of(kind)}
    found = {KL.get(group.name.removesuffix("+")) for group in of("kl")}
    assert {KL.get(name) for name in KL.names()} == found


def groups_that(status: str, kind: str) -> set[str]:
    """The methods of a kind of which some case has this status."""
    results = check.check(check.answers_of(adapter), of(kind))
    return {result.group.removeprefix(f"{kind}/") for result in results if result.status == status}


def test_a_loss_that_ignores_the_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but GMPO's, which is one number for all tokens of a response."""
    everywhere = lambda losses, mask, mode, **options: losses.sum() / mask.numel()  # noqa: E731
    monkeypatch.setattr("grpo_dist.algorithms.aggregate.agg_loss", everywhere)
    assert groups_that(check.AGREES, "policy_loss") == {"geo_mean"}


def test_a_lost_upper_clip_range_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_dist.algorithms.policy_loss.clip_range", lambda config: (0.2, 0.2))
    ranges = {"vanilla", "gspo", "geo_mean", "cispo", "clip_cov", "dppo_tv", "dppo_kl"}
    assert groups_that(check.DIFFERS, "policy_loss") == ranges
    assert clip_range({"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}) == (0.1, 0.3)


def test_a_deviation_of_the_wrong_kind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With n in place of n - 1."""
    biased = lambda groups, values: (groups.mean((values - groups.mean(values)) ** 2)).sqrt()  # noqa: E731
    monkeypatch.setattr("grpo_dist.algorithms.advantage.inputs.Groups.std", biased)
    differ = groups_that(check.DIFFERS, "advantage")
    assert {"grpo", "grpo_passk"} <= differ
    assert "rloo" not in differ


def test_a_rejection_that_goes_the_wrong_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_dist.algorithms.correction.bounded_log_ratio", lambda a, b: torch.clamp(b - a, -20, 20))
    assert groups_that(check.DIFFERS, "correction")


def test_the_command_says_what_differs_and_by_how_much(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    assert check.main(["--json", str(file)]) == 0
    assert "| policy_loss/vanilla | 11 |" in capsys.readouterr().out
    assert {result["status"] for result in json.loads(file.read_text())["results"]} == {check.AGREES}
    monkeypatch.setattr(adapter, "kl", lambda name, case: {"kl": [[1.0] * 4] * 3})
    assert check.main([]) == 1
    assert "same 1.0e+00 (kl)" in capsys.readouterr().out


CASE = Case("one", "", {}, {"response_mask": [[1, 0]]}, {"advantages": [[2.0, 0.0]], "loss": 1.0})


@pytest.mark.parametrize(
    ("found", "status", "reason"),
    [
        ({"advantages": [[2.0, 7.0]], "loss": 1.0}, check.AGREES, ""),
        ({"advantages": [[2.0, 7.0]]}, check.AGREES, ""),
        ({"advantages": [[2.2, 0.0]], "loss": 1.0}, check.DIFFERS, "advantages"),
        ({"advantages": [[2.0, 0.0]], "loss": float("nan")}, check.DIFFERS, "loss"),
        ({}, check.NOT_OFFERED, "none of the outputs"),
        (check.NotOffered("no such loss"), check.NOT_OFFERED, "no such loss"),
        (ValueError("no such shape"), check.DIFFERS, "ValueError: no such shape"),
    ],
)
def test_status_of_a_case(found: dict | Exception, status: str, reason: str) -> None:
    """Off the mask advantages may be anything; an output that is not reported is not compared."""

    def answer(group: Group, case: Case) -> dict:
        if isinstance(found, Exception):
            raise found
        return found

    (result,) = check.check(answer, [Group("kind", "name", "", "", [CASE])])
    assert (result.status, result.reason) == (status, reason)


def test_numbers_are_rounded_by_the_largest() -> None:
    assert rounded([[1234.56789, 0.00123456]], digits=6) == [[1234.57, 0.0]]
    assert rounded([[1e-17, -1e-17]]) == [[0.0, 0.0]]
    assert text({"rows": [[1.5, 2.0], [3.0]]}) == '{\n  "rows": [\n    [1.5, 2.0],\n    [3.0]\n  ]\n}'


def test_another_version_is_refused(tmp_path: Path) -> None:
    document = json.loads((CASES / "kl_k1.json").read_text())
    (tmp_path / "kl_k1.json").write_text(json.dumps(document | {"version": 2}))
    with pytest.raises(ValueError, match="version 2"):
        read_all(tmp_path)
