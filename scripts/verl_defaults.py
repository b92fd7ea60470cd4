"""grpo_dist/config/verl_defaults.yaml, from the config of a checkout of verl.

python -m scripts.verl_defaults CHECKOUT > grpo_dist/config/verl_defaults.yaml
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

_HEAD = """# Every key of verl's PPO trainer with its default, at commit {commit} ({date}): made by
# `python -m scripts.verl_defaults CHECKOUT`. A key at its default is taken, since it says what leaving it out says.
"""


def defaults(checkout: Path) -> Iterator[tuple[str, Any]]:
    """(dotted key, default) of ppo_trainer.yaml of a checkout of verl, with references to other keys resolved."""
    with initialize_config_dir(str((checkout / "verl/trainer/config").resolve()), version_base=None):
        yield from _leaves(OmegaConf.to_container(compose("ppo_trainer"), resolve=True), "")


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _leaves(below, f"{key}.{name}".lstrip("."))
    else:
        yield key, value


def main() -> None:
    """Write the file to standard output."""
    checkout = Path(sys.argv[1])
    log = ["git", "-C", str(checkout), "log", "-1", "--format=%h %cs", "--abbrev=9"]
    commit, date = subprocess.run(log, check=True, capture_output=True, text=True).stdout.split()
    sys.stdout.write(_HEAD.format(commit=commit, date=date))
    for key, value in defaults(checkout):
        sys.stdout.write(f"{key}: {json.dumps(value)}\n")


if __name__ == "__main__":
    main()
