import io
import itertools
import os
import termios
from types import SimpleNamespace

import pytest

from grpo_dist.tracking import summary
from grpo_dist.tracking.summary import Progress, format_line

METRICS = {
    "critic/score/mean": 0.41,
    "actor/kl_loss": 0.0012,
    "actor/ppo_kl": 0.5,
    "val-core/a/acc/mean@1": 0.35,
    "response_length/mean": 31.2,
    "perf/tokens_per_s": 1834.4,
    "timing_s/step": 4.1,
    "timing_s/gen": 1.9,
    "timing_s/update_actor": 1.6,
}
LEFT = "  left 6 min 10 s"  # 37 steps as long as the one before, on the clock of the fixture
LINE = "step 3/40  reward 0.41  kl 0.0012  val 0.35  length 31.2  1834 tok/s  4.1 s (gen 1.9, update 1.6)"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def real_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """10 s pass from one look to the next; what the first step did besides took long."""
    looks = itertools.chain([0.0, 10.0], itertools.count(1000.0, step=10.0))
    monkeypatch.setattr(summary, "time", SimpleNamespace(monotonic=lambda: next(looks)))


def test_pipe_gets_one_line_per_step():
    stream = io.StringIO()
    with Progress(40, 2, stream) as progress:
        progress.phase("generate")
        progress.step(3, METRICS)
        progress.phase("update")
        progress.step(4, {"critic/score/mean": 0.5})
        progress.message("checkpoint written")
    assert stream.getvalue() == f"{LINE}{LEFT}\nstep 4/40  reward 0.5  left 6 min 00 s\ncheckpoint written\n"


def test_no_time_is_left_before_the_first_step_and_after_the_last():
    stream = io.StringIO()
    with Progress(4, 2, stream) as progress:
        progress.step(2, {"val-core/a/acc/mean@1": 0.25})
        progress.step(4, {"critic/score/mean": 0.5})
    assert stream.getvalue() == "step 2/4  val 0.25\nstep 4/4  reward 0.5\n"


STUCK = METRICS | {
    "response_length/clip_ratio": 0.45,
    "critic/zero_variance_groups": 0.75,
    "val-aux/arithmetic/truncated/mean": 1.0,
    "val-aux/other/truncated/mean": 0.0,
}
USUAL = METRICS | {
    "response_length/clip_ratio": 0.1,
    "critic/zero_variance_groups": 0.6,
    "val-aux/arithmetic/truncated/mean": 0.05,
}
TOLD = "reward 0.41  zero-variance 75%  kl 0.0012  val 0.35  val clipped 100%  length 31.2  clipped 45%"
SOURCES = {
    "val-core/a/acc/mean@4": 0.2,
    "val-core/b/acc/mean@4": 0.6,
    "val-core/a/acc/best@4": 1.0,
    "val-core/a/reward/mean@4": -5.0,
    "val-aux/a/acc/mean@4": 9.0,
}


@pytest.mark.parametrize(
    ("step", "metrics", "line"),
    [
        (3, STUCK, f"step 3/40  {TOLD}  1834 tok/s  4.1 s (gen 1.9, update 1.6)"),
        (3, USUAL, LINE),
        (0, {"val-aux/a/truncated/mean": 0.5}, "step 0/40 (before training)  val clipped 50%"),
        (0, {"val-core/a/acc/mean@1": 0.123456}, "step 0/40 (before training)  val 0.123"),
        (1, {"actor/ppo_kl": 0.00021}, "step 1/40  ppo_kl 0.00021"),
        (1, {"timing_s/step": 2.0}, "step 1/40  2.0 s"),
        (1, {"critic/score/mean": float("nan")}, "step 1/40  reward nan"),
        (1, SOURCES, "step 1/40  val 0.4"),
        (1, {"val-core/a/reward/mean@1": -5.0}, "step 1/40  val -5"),
    ],
)
def test_the_line_has_what_there_is_and_what_keeps_a_run_from_learning(step, metrics, line):
    """Answers that do not fit, and groups that teach nothing, where that is unusual; the mean accuracy of sources."""
    assert format_line(step, 40, metrics) == line


def test_terminal_gets_a_bar_with_phase_and_numbers_and_messages_above_it():
    """It forgets what no longer matters: a step's numbers with the step, those of a validation with the next one."""
    stream = Terminal()
    progress = Progress(40, 0, stream)
    accuracy, cut = "val-core/a/acc/mean@1", "val-aux/a/truncated/mean"
    shares = {"response_length/clip_ratio": 0.5, "critic/zero_variance_groups": 0.9}

    def last():
        return stream.getvalue().split("\r")[-1]

    progress.phase("ref_log_prob")
    assert "ref_log_prob" in stream.getvalue()
    progress.step(1, {accuracy: 0.0, cut: 1.0, "critic/score/mean": 0.1, **shares})
    assert "reward 0.1  zero-variance 90%  val 0  val clipped 100%  clipped 50%" in last()
    progress.step(2, {"critic/score/mean": 0.2})
    assert "reward 0.2  val 0  val clipped 100%]" in last(), "until the next validation"
    progress.step(3, METRICS | {cut: 0.0})
    assert "3/40" in last()
    assert "reward 0.41  val 0.35  kl 0.0012  1834 tok/s" in last()
    assert "\n" not in stream.getvalue()
    progress.message("checkpoint written")
    assert "3/40" in stream.getvalue().split("checkpoint written\n")[1], "the bar is drawn again below the message"
    progress.close()
    progress.close()
    assert stream.getvalue().endswith("\n")
    assert "step 3/40" not in stream.getvalue()


def test_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Progress(40, 0, stream) as progress:
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
