"""`grpo-dist agreement`: two real pairs of vLLM and trainer that agree, and five faults, each named where it is."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.cli.conftest import Call
from tests.cli.planted_faults import CPU, LAYER
from tests.cli.scripted import ENGINE
from tests.cli.test_export import TINY, checkpoint
from tests.messages import says

# Fault -> the operation that it is in.
FAULTS = {
    "another theta": f"{LAYER.replace('1', '0')}.self_attn.rope.q",
    "no k norm": f"{LAYER}.self_attn.k_norm",
    "no layer norm": f"{LAYER}.post_attention_layernorm",
    "swapped experts": f"{LAYER}.mlp.experts",
    "another temperature": "log_probs",
    "an old factor": f"{LAYER}.self_attn.q_proj",
}


@pytest.fixture(scope="module")
def found(random_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("agreement")
    checkpoint(folder / "run", "grpo by LoRA")
    code = [sys.executable, "-m", "tests.cli.planted_faults", str(folder), random_models["experts"]]
    ended = subprocess.run(code, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.deep
@pytest.mark.ray  # by itself: real engines
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_where_it_is(found: dict[str, Any], fault: str) -> None:
    assert found[fault]["first"] == FAULTS[fault]
    assert found[fault]["kl"] > 1e3 * max(found["mended"]["kl"], 1e-12)


@pytest.mark.deep
@pytest.mark.ray
def test_ends_that_agree_get_a_certificate_and_a_runs_checkpoint_is_compared(found: dict[str, Any]) -> None:
    assert found["mended"]["first"] is found["mended theta"]["first"] is None
    told = found["experts"]
    assert (told["code"], told["verdict"], told["first_difference"]) == (0, "agree", None)
    assert told["kl"] < 1e-9
    assert (told["limit"], told["responses"], told["unseen"]) == (0.01, 3, [])
    sampler, trainer = told["sampler"], told["trainer"]
    assert (sampler["type"], sampler["attention"]) == ("float32", ["CPUAttentionBackendImpl"])
    assert (trainer["type"], trainer["attention"]) == ("fp32", ["grpo_dist_segments"])
    assert trainer["layout"].startswith("shared prompts")
    operations = {each["name"]: each for each in told["operations"]}
    assert [*operations][:: len(operations) - 1] == ["model.embed_tokens", "log_probs"]
    assert {f"{LAYER}.{part}" for part in ("self_attn.rope.q", "mlp.gate", "mlp.experts")} <= operations.keys()
    assert all(0 <= each["mean"] <= each["largest"] < 1e-4 for each in operations.values())
    assert all(each["mean"] <= each["rounding"] for each in operations.values())
    worst = told["worst_token"]
    assert worst["text"] == f"w{worst['id']}"
    assert worst["sampler"] == pytest.approx(worst["trainer"], abs=1e-4)
    says(told["out"], "--limit 0.01", "experts.json", f"{told['num_tokens']} tokens")
    told = found["run"]
    assert (told["model"], told["responses"], told["first_difference"]) == ("run step 4", 2, None)
    assert 0 < told["kl"] < 1e-9
    assert (told["code"], told["verdict"]) == (2, "beyond the limit"), "nothing is as close as --limit 0"
    says(told["out"], "--limit 0")


# --- bad arguments ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([ENGINE], ["actor_rollout_ref.rollout.name", "vllm"]),
        (["--limit", "-1"], ["--limit -1.0", 0]),
        (["--limit", "nan"], ["--limit nan"]),
        (["--n", "0"], ["--n 0", 1]),
        (["--max-tokens", "0"], ["--max-tokens 0", 1]),
        (["--prompts", "gone.jsonl"], ["gone.jsonl"]),
        (["--output", "gone/certificate.json"], ["--output gone/certificate.json"]),
    ],
)
def test_mistakes(arguments: list[str], parts: list[Any], call: Call) -> None:
    says(call("agreement", TINY, CPU, *arguments, code=2).err, *parts)
