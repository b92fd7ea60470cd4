"""Stands in for benchmarks.gpu_check.process: what becomes of a part is its name. Notes each start in `starts`."""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from benchmarks.gpu_check.results import Figure, Result, write_result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--setup", type=json.loads)
    asked = parser.parse_args()
    with (asked.folder / "starts").open("a") as starts:
        starts.write(f"{asked.part}\n")
    once = asked.folder / "model fails once"
    if asked.part == "model" and once.exists():
        once.unlink()
        sys.exit(1)
    if asked.part == "model":
        (asked.folder / "model").mkdir()
    elif asked.part == "reads the model":
        assert (asked.folder / "model").is_dir()
    elif asked.part == "dies":
        print("the last line", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif asked.part == "hangs":
        time.sleep(600)
    status = asked.part if asked.part in ("failed", "skipped", "out of memory") else "done"
    reason = "" if status == "done" else f"why {status}"
    write_result(asked.folder, Result(asked.part, status, asked.setup, reason, 1.0, (Figure("a", 1.5, "s"),)))


if __name__ == "__main__":
    main()
