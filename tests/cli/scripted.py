"""An engine that says what stands in a file of its model's folder, for tests of the commands that use a model."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import load_tokenizer
from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import EngineSettings, SamplingSettings
from tests.engines.fakes import FakeRolloutEngine
from tests.records import json_lines

ENGINE = "actor_rollout_ref.rollout.name=tests.cli.scripted:ScriptedEngine"
SCRIPT, SEEN = "script.json", "seen.jsonl"


class ScriptedEngine(FakeRolloutEngine):
    """Answers with the texts of the script's entry that the prompt contains; writes down what it was asked."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.folder = Path(settings.model.path)
        self.tokenizer = load_tokenizer(str(self.folder), trust_remote_code=False)
        self.script: dict[str, list[str]] = json.loads((self.folder / SCRIPT).read_text())

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingSettings, request_id: str | None = None
    ) -> list[Response] | None:
        asked = self.tokenizer.decode(prompt)
        with (self.folder / SEEN).open("a") as file:
            told = {"prompt": asked, "n": sampling.n, "temperature": sampling.temperature, "seed": sampling.seed}
            file.write(json.dumps(told | {"max_tokens": sampling.max_tokens, "stop": sampling.stop}) + "\n")
        texts = next(texts for part, texts in self.script.items() if part in asked)
        ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts[: sampling.n]]
        cut = [each[: sampling.max_tokens] for each in ids]
        return [
            Response(each, [0.0] * len(each), len(each) < len(all_), [0] * len(each))
            for each, all_ in zip(cut, ids, strict=True)
        ]


def scripted_model(folder: Path, script: dict[str, list[str]]) -> Path:
    shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), folder)
    (folder / SCRIPT).write_text(json.dumps(script))
    return folder


def seen(folder: Path) -> list[dict[str, Any]]:
    return json_lines(folder / SEEN)
