"""`grpo-dist audit RUN ...` names rows with a wrong or unreadable ground truth, by responses (docs/audit.md)."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist.assets import expanded
from grpo_dist.cli.arguments import check_output, command_parser, write_output
from grpo_dist.errors import ConfigError
from grpo_dist.redact import redact
from grpo_dist.terminal import show
from grpo_dist.tracking.jsonl import ROLLOUTS, VALIDATION, json_objects

LEAST = math.log(0.7 / 0.3)  # log-odds from which on a row is named
MOST, SHOWN = 20, 300  # rows that the terminal shows; last characters of a prompt or response
WINDOW = 100  # rows that were seen at about the same steps, whose pass rates have one Beta distribution
EVEN, HARD = (1.0, 1.0), (1.0, 3.0)  # Beta of any rate, and of hard rows' pass rates: some never pass, others at times
SLIP = 0.02  # how often a response passes by chance where the ground truth is wrong or cannot be read
PRIOR = np.array([10, 0.5, 0.5])  # rows of the three classes before any was seen
RATES = (np.arange(100) + 0.5) / 100
LINE = "{kind:<9} {probability:.2f}  {passed} of {responses} pass, {saying} say {says!r}, truth {truth!r}: {prompt!r}\n"


def main(arguments: Sequence[str]) -> int:
    """Show the rows, and write the list of those to leave out."""
    parser = command_parser("audit", "Which rows of a run have a wrong ground truth, or one that cannot be read?")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, finished or going on")
    parser.add_argument("--output", metavar="FILE", help="to write the list for data.exclude_rows, a .jsonl file")
    options = parser.parse_args(arguments)
    check_output(options.output)
    named = audit([expanded(folder) for folder in options.runs])
    for row in named[:MOST]:
        show(LINE.format(**row) + "".join(f"    {example!r}\n" for example in row["examples"]))
    show(f"{len(named)} rows are named, {len(named[:MOST])} shown: {dict(Counter(row['kind'] for row in named))}\n")
    if options.output:
        weak = ("guessed", "never")  # of the policy, not of the row; and a twin may be right
        bad = [row for row in named if row["kind"] not in weak and row["probability"] > 0.5]
        write_output(expanded(options.output), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in bad))
        show(f"wrote {len(bad)} rows: data.exclude_rows={options.output}\n")
    return 0


def audit(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Judge the rows of runs; returns those that are named, the surest first, or raises a ConfigError."""
    rows, asked = defaultdict[str, list[Any]](list), defaultdict[str, set[str]](set)
    for response in (each for folder in folders for each in _responses(folder)):
        rows[response["row"]].append(response)
        asked[response["asked"]].add(response["row"])
    found = sorted(rows.values(), key=lambda row: (row[0]["place"], sum(each["step"] for each in row) / len(row)))
    unpaid = [Counter(each["says"] for each in row if not each["passed"]) for row in found]
    tops = [max(counts.items(), key=lambda item: item[1], default=("", 0)) for counts in unpaid]
    size, passed = np.array([(len(row), sum(each["passed"] for each in row)) for row in found]).T
    odds, prior = _odds(size, passed, np.array([count for _, count in tops]))
    able, elsewhere, named = _log(passed, size, EVEN), sum(unpaid, Counter[str]()), []
    for row, n, hits, (says, saying), wrong, solved in zip(found, size, passed, tops, odds, able, strict=True):
        first, truth, twins = row[0], _plain(row[0]["truth"]), len(asked[row[0]["asked"]]) - 1
        usual = (elsewhere[truth] + 0.5) / (elsewhere.total() + 1)  # where the policy errs
        kind = "duplicate" if twins else "scorer" if says == truth else "truth"
        kinds = {kind: wrong - prior + math.log(twins) if twins else wrong}
        if hits:
            kinds["guessed"] = hits * math.log(usual) + (n - hits) * math.log(1 - usual) - solved
        elif (visits := len({each["step"] for each in row})) > 1:
            kinds["never"] = math.log((n + HARD[1]) / n * visits)
        kind = next((kind for kind in kinds if kinds[kind] >= LEAST), "duplicate")
        if kind in kinds:
            shown = sorted(row, key=lambda each: each["says"] != says)[:3]
            chance = round(1 / (1 + math.exp(-max(kinds[kind], -99))), 3)
            entry = {"row": first["row"], "kind": kind, "probability": chance, "prompt": first["input"][-SHOWN:]}
            entry |= {"truth": first["truth"], "says": says, "saying": saying, "passed": int(hits), "responses": int(n)}
            examples = [f"{each['score']:g}: {each['output'][-SHOWN:]}" for each in shown]
            named.append(redact(entry | {"examples": examples}))
    return sorted(named, key=lambda entry: -entry["probability"])


def _responses(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the scored responses of a run, with what they say."""
    count, files = 0, [path for name in (ROLLOUTS, VALIDATION) for path in (folder / name).glob("[0-9]*.jsonl")]
    for path in files:
        with suppress(FileNotFoundError):  # a run that goes on has made room
            for number, row in json_objects(path):
                if isinstance(row, str) or not {"row", "input", "output", "gts", "score"} <= row.keys():
                    raise ConfigError(f"{path}, line {number}: no digest of its row; audit a run of this version")
                count += row["score"] is not None
                if row["score"] is not None:
                    truth = row["gts"] if isinstance(row["gts"], str) else json.dumps(row["gts"], ensure_ascii=False)
                    row |= {"place": str(path.parent), "step": int(path.stem), "truth": truth}
                    row |= {
                        "passed": row.get("acc", row["score"]) > 0.5,
                        "says": _plain(row.get("pred") or row["output"]),
                    }
                    yield row | {"asked": row["input"] + str(row.get("images"))}
    if not count:
        raise ConfigError(f"{folder}: no scored {ROLLOUTS}; name a run's folder, with trainer.log_rollouts=true")


def _plain(text: str) -> str:
    """The last number of a text's last line; where it has none, or a formula, the line without space and case."""
    line = (text.strip().splitlines() or [""])[-1]
    numbers = re.findall(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", line)
    if not numbers or re.search(r"[\\^/]", line):
        return "".join(line.casefold().split())
    return re.sub(r"(\.\d*?)0+$", r"\1", numbers[-1].replace(",", "").lstrip("+")).rstrip(".")


def _odds(size: Any, passed: Any, saying: Any) -> tuple[Any, float]:
    """The log-odds, (R,), that rows in the order of their steps are wrong, and those of any: EM of docs/audit.md."""
    agree, mistakes = np.maximum(saying - 1, 0), np.maximum(size - passed - 1, 0)
    chances, logs = np.where(passed[:, None] > 0, [0.9, 0.08, 0.02], 1 / 3), np.zeros((len(size), 3))
    for _ in range(40):
        for part in np.array_split(np.arange(len(size)), len(size) // WINDOW or 1):
            hits, sizes = np.concatenate([passed[part], saying[part]]), np.concatenate([size[part]] * 2)
            usual = _beta(hits, sizes, chances[part][:, ::2].T.ravel())
            logs[part, 0] = _log(passed[part], size[part], usual)
            logs[part, 2] = _log(saying[part], size[part], usual) + passed[part] * math.log(SLIP)
        logs[:, 0] += _log(agree, mistakes, _beta(agree, mistakes, (1 - chances[:, 2]) * (passed > 0)))
        logs[:, 1] = _log(passed, size, HARD) + _log(agree, mistakes, EVEN)
        shares = (chances.sum(0) + PRIOR) / (len(size) + PRIOR.sum())
        weighed = logs + np.log(shares)
        chances = np.exp(weighed - np.logaddexp.reduce(weighed, axis=1, keepdims=True))
    return weighed[:, 2] - np.logaddexp(weighed[:, 0], weighed[:, 1]), math.log(shares[2] / (1 - shares[2]))


def _beta(hits: Any, sizes: Any, weights: Any) -> tuple[float, float]:
    """The Beta distribution of the rates that give counts of this mean and variance."""
    mean = (weights @ hits + 0.5) / (weights @ sizes + 1)
    spread, pairs = mean * (1 - mean), weights @ (sizes * (sizes - 1))
    excess = weights @ ((hits - sizes * mean) ** 2 - sizes * spread)
    alike = np.clip(excess / (pairs * spread), 0.02, 0.95) if pairs > 1 else 0.5  # correlation of a row's responses
    return mean * (1 / alike - 1), (1 - mean) * (1 / alike - 1)


def _log(hits: Any, sizes: Any, beta: tuple[float, float]) -> Any:
    """The log-probability of so many hits, in some order, at a rate from a Beta distribution."""
    density = (beta[0] - 1) * np.log(RATES) + (beta[1] - 1) * np.log1p(-RATES)
    logs = np.outer(hits, np.log(RATES)) + np.outer(sizes - hits, np.log1p(-RATES)) + density
    return np.logaddexp.reduce(logs, axis=1) - np.logaddexp.reduce(density)
