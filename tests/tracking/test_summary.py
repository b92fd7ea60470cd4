"""What the summary says of a run, and the sentence about idle roles, by hand."""

import io
import itertools
import math
import os
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_dist.plan.commands import load_config
from grpo_dist.plan.plan import make_plan
from grpo_dist.terminal import as_typed
from grpo_dist.tracking.summary import Progress, format_line, format_seconds, format_summary, sparkline, who_waited
from tests.messages import says

VAL = "val-core/arithmetic/acc/mean@1"


def row(step, reward, length=20.0, **more):
    timings = {"timing_s/step": 4.0, "timing_s/gen": 2.0, "timing_s/update_actor": 1.0, "perf/tokens_per_s": 100.0}
    return {"step": step, "critic/score/mean": reward, "response_length/mean": length} | timings | more


def entry(text, label):
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith(label)]
    return line.removeprefix(label).split()


def summary(history, tmp_path, hf_model=None, seconds=192.0, flags=None, job=None, why="", first_step=0):
    flags = dict.fromkeys(("eval", "generate", "serve"), "") if flags is None else flags
    more = {"hf_model": hf_model, "flags": flags, "job": job, "first_step": first_step}
    return format_summary(history, run_dir=tmp_path, seconds=seconds, why=why, **more)


def test_the_first_line_says_how_far_it_came_and_why_it_ended(tmp_path):
    history = [row(step, 0.1 * step) for step in range(1, 7)]
    says(summary(history, tmp_path, why="acc is 0.95").splitlines()[0], "6 training steps", "acc is 0.95")
    resumed = summary(history, tmp_path, first_step=5)
    says(resumed.splitlines()[0], "6 training steps", "2 of them")
    assert entry(resumed, "reward")[:3] == ["0.1", "->", "0.6"], "it is of the whole run"
    assert "of them" not in summary(history, tmp_path, first_step=1)
    says(summary([{"step": 1, "timing_s/step": 4.0}], tmp_path), "1 training step", "3 min")  # of one model
    finished, metrics = summary([], tmp_path, seconds=8.31).splitlines()
    says(finished, "0 training steps", "8.3 s")
    assert metrics == f"  metrics               {tmp_path / 'metrics.jsonl'}"


def test_parts_of_the_reward_and_one_that_stood_still(tmp_path):
    right, short = "reward_extra/right/mean", "reward_extra/short/mean"
    history = [row(step, 0.1 * step - 0.4, **{right: 0.0, short: 0.1 * step - 0.4}) for step in (1, 2, 3)]
    text = summary(history, tmp_path)
    assert entry(text, "short") == ["-0.3", "->", "-0.1"]
    (sentence,) = [line for line in text.splitlines() if "right at 0" in line]
    assert "short" not in sentence
    assert "right at" not in summary(history[:1], tmp_path)
    history[2][right] = 0.5
    assert "right at" not in summary(history, tmp_path)


def test_groups_of_equal_scores_train_nothing(tmp_path):
    def told(*shares):
        history = [row(step, 0.0, **{"critic/zero_variance_groups": share}) for step, share in enumerate(shares, 1)]
        return [line for line in summary(history, tmp_path).splitlines() if "rollout.n" in line]

    says(*told(1.0, 0.95, 0.75), "90%")
    assert told(1.0, 0.85, 0.75) == told() == []


def test_before_after_and_best(tmp_path):
    history = [{"step": 0, VAL: 0.31}, row(1, 0.3, 31.25), row(2, 0.5, **{VAL: 0.84}), row(3, 0.8, 24.0, **{VAL: 0.82})]
    text = summary(history, tmp_path, Path("/models/final"))
    says(text.splitlines()[0], "3 training steps", "3 min", "12 s")
    assert entry(text, "validation accuracy") == ["0.31", "->", "0.82", "(best", "0.84", "at", "step", "2)"]
    assert entry(text, "reward") == ["0.3", "->", "0.8", "▁▄█"]
    assert entry(text, "response length") == ["31.2", "->", "24"]
    assert entry(text, "tokens/s") == ["100"]
    assert entry(text, "metrics") == [str(tmp_path / "metrics.jsonl")]
    assert entry(text, "model (Hugging Face)") == ["/models/final"]
    assert "tensorboard" not in text


def test_it_ends_with_what_to_do_next(tmp_path):
    folder = tmp_path / "my run"
    (folder / "tensorboard").mkdir(parents=True)
    text = summary([row(1, 0.3)], folder, Path("/models/final"))
    says(text, "1 training step", f"tensorboard --logdir '{folder}/tensorboard'")
    commands = (f"report '{folder}'", f"eval '{folder}' --base", f"generate '{folder}'", f"serve '{folder}'")
    for line, command in zip(text.splitlines()[-4:], commands, strict=True):
        assert line.endswith(f"  {as_typed('grpo-dist')} {command}")
    of_own_code = summary([row(1, 0.3)], folder, Path("/models/final"), flags={"eval": " --trust-run-code"})
    assert f"grpo-dist eval '{folder}' --base --trust-run-code" in of_own_code
    assert of_own_code.count("--trust-run-code") == 1
    without_model = summary([row(1, 0.3)], folder)
    assert "grpo-dist report" in without_model
    assert "grpo-dist serve" not in of_own_code + without_model, "it is told what can use the model"
    of_sft = summary([{"step": 1, "timing_s/step": 1.0, "sft/loss": 2.0}], folder, Path("/models/final"))
    assert "grpo-dist eval" not in of_sft, "it has no reward to evaluate with"


def test_time_table_has_mean_seconds_shares_and_the_rest(tmp_path):
    # Step 0 only validates: its time belongs to no step.
    validated = {"step": 0, VAL: 0.1, "timing_s/testing": 50.0}
    history = [validated, row(1, 0.3), row(2, 0.5, **{"timing_s/save_checkpoint": 0.8})]
    text = summary(history, tmp_path)
    says(text, "per step", "2)")
    phases = ["gen 2.00 s 50%", "update_actor 1.00 s 25%", "save_checkpoint 0.40 s 10%", "other 1.00 s 25%"]
    table = [" ".join(line.split()) for line in text.splitlines() if line.endswith("%")]
    assert table == [*phases, "step 4.00 s 100%"], "a step does not count the checkpoint"
    assert "testing" not in text


def test_phases_that_overlap_and_tokens_per_second_by_the_time_of_steps(tmp_path):
    text = summary([row(1, 0.3, **{"timing_s/ref": 1.5})], tmp_path)
    says(text, "per step", "overlap)")
    assert "other" not in text
    history = [row(1, 0.1, **{"timing_s/step": 1.0}), row(2, 0.1, **{"timing_s/step": 9.0, "perf/tokens_per_s": 200.0})]
    assert entry(summary(history, tmp_path), "tokens/s") == ["190"]


def test_several_validation_sources_get_a_line_each(tmp_path):
    a, b = "val-core/a/acc/mean@1", "val-core/b/acc/mean@1"
    first = {"step": 0, a: 0.1, b: 0.2, "val-core/a/acc/best@8": 0.9}
    text = summary([first, {"step": 5, a: 0.3, b: math.nan}], tmp_path)
    assert entry(text, "a/acc/mean@1") == ["0.1", "->", "0.3", "(best", "0.3", "at", "step", "5)"]
    assert entry(text, "b/acc/mean@1") == ["0.2", "->", "nan", "(best", "0.2", "at", "step", "0)"]
    assert "best@8" not in text


def test_sparkline():
    for values, line in (
        (range(8), "▁▂▃▄▅▆▇█"),
        ([3] * 3, "▁▁▁"),
        ([0, math.nan, 7], "▁ █"),
        ([], ""),
        ([math.nan], ""),
    ):
        assert sparkline(list(values), 40) == line
    assert [sparkline([0, 0, 10, 10], 2), sparkline(list(range(8000)), 8)] == ["▁█", "▁▂▃▄▅▆▇█"]


def test_format_seconds():
    told = {8.31: "8.3 s", 59.99: "60.0 s", 60: "1 min 00 s", 192: "3 min 12 s", 3599.7: "1 h 00 min"}
    assert {seconds: format_seconds(seconds) for seconds in told} == told


def test_it_says_which_role_waited(tmp_path):
    idle = {"perf/idle/actor": 0.5, "perf/idle/rollout": 0.25}
    history = [row(step, 0.3, **idle) for step in (1, 2, 3)]
    assert "from step 3 on" in summary(history, tmp_path, job=make_plan(load_config([])[0]))
    assert "idle" not in summary(history, tmp_path), "a job of one role"


NO_KL = "actor_rollout_ref.actor.use_kl_loss=false"  # 4 actor ranks and 4 engines on GPUs of their own
SPLIT = ("cluster.actor_world_size=4", "cluster.rollout_world_size=4")


def steps(*, count: int = 4, **idle: float) -> list[dict[str, float]]:
    """The first two steps show the opposite, since they hold compilation."""
    rows = []
    for step in range(1, count + 1):
        shares = {f"perf/idle/{role}": share if step > 2 else 1 - share for role, share in idle.items()}
        rows.append({"step": step, "timing_s/step": 2.0, **shares})
    return rows


def sentence(rows: list[dict[str, float]], *overrides: str) -> str:
    return who_waited(rows, make_plan(load_config(list(overrides))[0]))


@pytest.mark.parametrize(
    ("actor", "rollout", "overrides", "parts"),
    [
        (0.03, 0.45, (), ("fewer engines", "more actor", *SPLIT, "ranks 3%", "engines 45%")),
        (0.45, 0.03, (), ("fewer actor", "more engines", *SPLIT, "ranks 45%", "engines 3%")),
        (0.10, 0.15, (), ("balanced",)),
        (0.50, 0.45, (), ("trainer.max_staleness=0 -> 1",)),
        (0.30, 0.25, ("trainer.max_staleness=1",), ("trainer.max_staleness=1 -> 2",)),
        (0.03, 0.45, ("cluster.rollout_world_size=1",), ("more GPUs", "actor ranks", "cluster.rollout_world_size=1")),
        (0.45, 0.03, ("cluster.actor_world_size=1",), ("more GPUs", "engines", "cluster.actor_world_size=1")),
    ],
)
def test_roles_with_gpus_of_their_own(actor, rollout, overrides, parts) -> None:
    says(sentence(steps(actor=actor, rollout=rollout), "cluster=node8", NO_KL, *overrides), "step 3", *parts)


def test_roles_that_share_gpus() -> None:
    """Of the GPUs of actor and reference, 50 % and 30 % of the time are used: 20 % are idle."""
    text = sentence(steps(actor=0.5, ref=0.7, rollout=0.05), "cluster=node8")
    says(text, "ref 20%", "engines 5%", "balanced")
    rows = steps(actor=0.5, rollout=0.45)
    says(sentence(rows, "cluster=single_gpu"), "cluster.colocate=all", "no split")
    says(sentence(rows), "cores", "no split")
    assert "cluster." not in sentence(rows)


def test_steps_count_by_their_seconds_and_the_first_two_do_not() -> None:
    rows = steps(count=2, actor=0.5, rollout=0.5)
    assert sentence(rows) == sentence([{"step": 0, "val-core/x": 0.5}, *rows]) == ""
    for step, seconds, share in ((3, 3.0, 0.2), (4, 1.0, 0.6)):
        rows.append({"step": step, "timing_s/step": seconds, "perf/idle/actor": share, "perf/idle/rollout": 0.3})
    says(sentence(rows), "ranks 30%", "engines 30%")
    assert sentence([{"step": step, "timing_s/step": 1.0} for step in range(1, 9)]) == ""


# --- the line and the bar of a run ------------------------------------------------------------------------------------
METRICS = {"critic/score/mean": 0.41, "actor/kl_loss": 0.0012, "actor/ppo_kl": 0.5, "val-core/a/acc/mean@1": 0.35}
METRICS |= {"response_length/mean": 31.2, "perf/tokens_per_s": 1834.4}
METRICS |= {"timing_s/step": 4.1, "timing_s/gen": 1.9, "timing_s/update_actor": 1.6}
LEFT = "  left 6 min 10 s"  # 37 steps as long as the one before, on the clock of the fixture
LINE = "step 3/40  reward 0.41  kl 0.0012  val 0.35  length 31.2  1834 tok/s  4.1 s (gen 1.9, update 1.6)"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def real_terminal_and_clock(monkeypatch):
    """10 s pass from one look to the next; what the first step did besides took long."""
    monkeypatch.setenv("TERM", "xterm")
    looks = itertools.chain([0.0, 10.0], itertools.count(1000.0, step=10.0))
    monkeypatch.setattr("grpo_dist.tracking.summary.time", SimpleNamespace(monotonic=lambda: next(looks)))


def test_pipe_gets_one_line_per_step():
    with Progress(40, 2, stream := io.StringIO()) as progress:
        progress.phase("generate")
        progress.step(3, METRICS)
        progress.phase("update")
        progress.step(4, {"critic/score/mean": 0.5})
        progress.message("checkpoint written")
    assert stream.getvalue() == f"{LINE}{LEFT}\nstep 4/40  reward 0.5  left 6 min 00 s\ncheckpoint written\n"


def test_no_time_is_left_before_the_first_step_and_after_the_last():
    with Progress(4, 2, stream := io.StringIO()) as progress:
        progress.step(2, {"val-core/a/acc/mean@1": 0.25})
        progress.step(4, {"critic/score/mean": 0.5})
    assert stream.getvalue() == "step 2/4  val 0.25\nstep 4/4  reward 0.5\n"


CLIPPED, EQUAL, CUT = "response_length/clip_ratio", "critic/zero_variance_groups", "val-aux/sums/truncated/mean"
STUCK = METRICS | {CLIPPED: 0.45, EQUAL: 0.75, CUT: 1.0, "val-aux/other/truncated/mean": 0.0}
USUAL = METRICS | {CLIPPED: 0.1, EQUAL: 0.6, CUT: 0.05}
TOLD = "reward 0.41  zero-variance 75%  kl 0.0012  val 0.35  val clipped 100%  length 31.2  clipped 45%"
SOURCES = {"val-core/a/acc/mean@4": 0.2, "val-core/b/acc/mean@4": 0.6, "val-core/a/acc/best@4": 1.0}
SOURCES |= {"val-core/a/reward/mean@4": -5.0, "val-aux/a/acc/mean@4": 9.0}


@pytest.mark.parametrize(
    ("step", "metrics", "line"),
    [
        (3, STUCK, f"step 3/40  {TOLD}  1834 tok/s  4.1 s (gen 1.9, update 1.6)"),
        (3, USUAL, LINE),
        (0, {CUT: 0.5}, "step 0/40 (before training)  val clipped 50%"),
        (0, {"val-core/a/acc/mean@1": 0.123456}, "step 0/40 (before training)  val 0.123"),
        (1, {"actor/ppo_kl": 0.00021}, "step 1/40  ppo_kl 0.00021"),
        (1, {"timing_s/step": 2.0}, "step 1/40  2.0 s"),
        (1, {"critic/score/mean": float("nan")}, "step 1/40  reward nan"),
        (1, SOURCES, "step 1/40  val 0.4"),
        (1, {"val-core/a/reward/mean@1": -5.0}, "step 1/40  val -5"),
    ],
)
def test_the_line_has_what_there_is_and_what_keeps_a_run_from_learning(step, metrics, line):
    assert format_line(step, 40, metrics) == line


def test_terminal_gets_a_bar_with_phase_and_numbers_and_messages_above_it():
    """It forgets what no longer matters: a step's numbers with the step, those of a validation with the next one."""
    stream = Terminal()
    progress = Progress(40, 0, stream)
    accuracy = "val-core/a/acc/mean@1"

    def last():
        return stream.getvalue().split("\r")[-1]

    progress.phase("ref_log_prob")
    assert "ref_log_prob" in stream.getvalue()
    progress.step(1, {accuracy: 0.0, CUT: 1.0, "critic/score/mean": 0.1, CLIPPED: 0.5, EQUAL: 0.9})
    assert "reward 0.1  zero-variance 90%  val 0  val clipped 100%  clipped 50%" in last()
    progress.step(2, {"critic/score/mean": 0.2})
    assert "reward 0.2  val 0  val clipped 100%]" in last(), "until the next validation"
    progress.step(3, METRICS | {CUT: 0.0})
    assert all(part in last() for part in ("3/40", "reward 0.41  val 0.35  kl 0.0012  1834 tok/s"))
    assert "\n" not in stream.getvalue()
    progress.message("checkpoint written")
    assert "3/40" in stream.getvalue().split("checkpoint written\n")[1], "the bar is drawn again below the message"
    progress.close()
    progress.close()
    assert stream.getvalue().endswith("\n")
    assert "step 3/40" not in stream.getvalue()


def test_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with Progress(40, 0, stream := Terminal()) as progress:
        progress.step(3, METRICS)
    assert stream.getvalue() == LINE + "  left 2 min 03 s\n"


@pytest.mark.parametrize(("size", "bar"), [((0, 0), False), ((0, 110), False), ((40, 110), True)])
def test_terminal_without_a_size_gets_lines(size, bar):
    main, side = os.openpty()
    termios.tcsetwinsize(side, size)
    with os.fdopen(side, "w") as stream, Progress(40, 2, stream) as progress:
        progress.step(3, METRICS)
        progress.close()
        shown = ""
        while "3/40" not in shown or not shown.endswith("\n"):  # a read returns one write or several
            shown += os.read(main, 10_000).decode(errors="replace")
    os.close(main)
    assert (shown == LINE + LEFT + "\r\n") is not bar
    assert ("3/40 |" in shown) is bar


def test_no_stream_shows_nothing(capsys):
    with Progress(2, 0, None) as progress:
        progress.phase("generate")
        progress.step(1, METRICS)
        progress.message("text")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_reader_that_went_away_does_not_end_the_run(kind):
    class Breakable(kind):
        broken, refused = False, 0

        def write(self, text):
            if self.broken:
                self.refused += 1
                raise BrokenPipeError("reader is gone")
            return super().write(text)

    stream = Breakable()
    with Progress(2, 0, stream) as progress:
        stream.broken = True
        progress.phase("generate")
        progress.step(1, METRICS)
        progress.message("text")
    assert stream.refused >= 2


def test_stream_that_cannot_spell_a_sparkline():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Progress(2, 0, stream).message("reward ▁█")
    assert raw.getvalue() == b"reward ??\n"
