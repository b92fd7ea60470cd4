"""`grpo-dist report RUN_DIR` writes a page with the run's curves, alarms and responses."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from grpo_dist.assets import expanded
from grpo_dist.cli.arguments import command_parser, write_output
from grpo_dist.cli.audit import audit
from grpo_dist.errors import ConfigError
from grpo_dist.terminal import columns, show

MOST_RESPONSES = 10_000


def main(arguments: Sequence[str]) -> int:
    """Write the report, or serve it while the run goes on."""
    options = _parser().parse_args(arguments)
    from grpo_dist.report import page, rollouts  # they load torch, seconds that --help does without
    from grpo_dist.runs import noting, read_run

    if find_spec("plotly") is None:
        raise ConfigError("grpo-dist report draws with Plotly: pip install 'grpo_dist[report]'")
    folders = [expanded(folder) for folder in (options.run_dir, *options.compare)]
    runs = [read_run(folder) for folder in folders]
    if options.serve:
        with page.ReportServer(folders, options.port) as opened, contextlib.suppress(KeyboardInterrupt):
            show(f"{opened.url}\nends with Ctrl-C\n")
            opened.serve_forever()
        return 0
    steps = rollouts.chosen_steps(folders[0], runs[0].rollout_steps, options.responses)
    problems, texts = [problem for run in runs for problem in run.problems], None
    with noting(problems, "all tokens are left out"):
        texts = rollouts.load_token_texts(folders[0]) if steps else None
    shown, named = {step: rollouts.read_step(folders[0], step, texts) for step in steps}, list[dict[str, object]]()
    with noting(problems, "what an audit of the rows finds is left out"):
        named += audit(folders[:1]) if steps else []
    runs[1:] = [rollouts.against(runs[0], run) for run in runs[1:]]
    whole = page.page(runs, shown, named)
    for problem in (*problems, *(problem for step in shown.values() for problem in step["problems"])):
        show(f"warning: {problem}\n", sys.stderr)
    target = expanded(options.output) if options.output else folders[0] / "report.html"
    write_output(target, whole)
    left_out = len(runs[0].rollout_steps) - len(steps)
    more = f"; responses of {len(steps)} steps, {left_out} left out (--responses, --serve)" if left_out else ""
    for run in runs:
        show(f"{run.name}: " + "; ".join(f"{label} {text}" for label, text in page.facts(run)[1:]) + "\n")
    show("".join(f"{line}\n" for line in columns(page.against(runs))))
    show(f"wrote {target} ({target.stat().st_size / 2**20:.1f} MiB{more})\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "report",
        "One HTML file about a run, which needs no network: curves with health alarms, where the seconds "
        "went, and the responses token by token.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of the run, finished or going on")
    other = "folder of another run, for curves, config and, prompt by prompt, the difference of rewards"
    parser.add_argument("--compare", metavar="OTHER", action="append", default=[], help=other)
    parser.add_argument("--output", metavar="FILE", help="to write; default: RUN_DIR/report.html")
    most = "responses that the file may hold; of more, steps are left out evenly (default: %(default)s)"
    parser.add_argument("--responses", metavar="N", type=int, default=MOST_RESPONSES, help=most)
    parser.add_argument("--serve", action="store_true", help="serve a page that follows the run, on loopback, instead")
    parser.add_argument("--port", type=int, default=0, help="with --serve; default: a free one")
    return parser
