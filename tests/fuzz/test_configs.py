"""Two thousand broken command lines: each loads, or is one ConfigError that names what is at fault."""

import random

import pytest

from grpo_dist.config.keys import leaf_keys, section_keys
from grpo_dist.config.load import readable_config
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import GRPO, load_config
from grpo_dist.plan.text import format_plan, format_summary
from tests.config.read_back import read_back

CASES, PARTS = 2000, 4
LONGEST_MESSAGE = 20_000

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VALID = [
    [],
    ["model=tiny", "data=arithmetic", "cluster=cpu"],
    ["+recipe=dapo", "trainer.seed=3", "trainer.experiment_name=a_b"],
    ["recipe=dr_grpo", f"{ROLLOUT}.n=4", "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16"],
    ["recipe=gspo", f"{ACTOR}.optim.lr=1e-5", f"{ACTOR}.optim.betas=[0.9,0.95]", "trainer.logger=[console,wandb]"],
    ["cluster=node8", "trainer.nnodes=2", f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.total_epochs=3"],
    ["cluster=single_gpu", f"{ROLLOUT}.gpu_memory_utilization=0.4", f"{ACTOR}.kl_loss_type=full"],
    ["custom_reward_function.reward_kwargs={a: 1, b: [x, y]}", f"{ROLLOUT}.engine_kwargs.vllm.block_size=32"],
    ["algorithm.rollout_correction.rollout_is=token", "trainer.max_staleness=2", f"{ROLLOUT}.stop=[a,b]"],
    ["data.val_files=null", "trainer.test_freq=-1", "data.system_prompt='Think: step by step'"],
]
VALUES = [
    "", "''", '""', "' '", "null", "None", "~", "true", "false", "yes", "0", "-1", "1", "2", "7", "1.5", "-0.0", "0.1",
    "1e6", "1e-6", "1e400", "-1e400", "nan", ".nan", "inf", "-inf", ".inf", "9" * 30, "-" + "9" * 400, "1_000", "0x10",
    "0b1", "1e", "--1", "+1", "'1'", "'nan'", "'1e-6'", "'1e999'", "text", "a b", "a,b", "1,2", "[]", "[1]", "[1,2,3]",
    "[a,b]", "[null]", "[[1]]", "[nan]", "{}", "{a: 1}", "{a: {b: [1, null]}}", "{a: 1, a: 2}", "{1: 2}", "{null: 1}",
    "{true: 1}", "{1.5: x}", "{'': 1}", "[1,", "{a:", "{a", "}", "]", "'open", '"open', "\\", "a=b", "=", "a:b",
    "a:b:c", "größe", "日本語", "🙂", "\u202e", "\x00", "\x07", "\x7f", "a\nb", "a\tb", "\ud800", "/", ".", "..",
    "~nobody/x", "/proc/self/mem", "/dev/null", "/dev/zero/x.parquet", "/root", "x.parquet", "file.py:f", ":f", "mod:",
    "a/b", "a/b/c", "hf:", "hf:a/b", "builtin:", "builtin:nope", "builtin:../x", "builtin:arithmetic/train",
    "${trainer.seed}", "${nope}", "${", "${}", "${oc.env:HOME}", "${oc.env:NOT_THERE}", "${trainer}", "${.x}",
    "${oc.eval:1}", "${oc.decode:[1}", "???", "${trainer.experiment_name}", "!!python/object:os.system", "&a [*a]",
    "*a", "%", "|", ">", "@x", "`x`", "x@y", "int(3)", "int(x)", "float(1)", "bool(x)", "str(1)", "range(1,3)",
    "range(1,1e9)", "choice(1,2)", "interval(0,1)", "glob(*)", "sort(3,2)", "shuffle(1,2)", "tag(a,1)",
    "json_str({a:1})", "extend_list(1)", "nofunction(1)", "cast(x)", "x" * 100_000, "1," * 3000 + "1",
    "[" * 40 + "]" * 40, "{a:" * 30 + "1" + "}" * 30, "é" * 5000,
]  # fmt: skip
KEYS = [
    "", ".", "..", "a", "a.b.c", "trainer.", ".trainer", "trainer..seed", "trainer.seed.x", "trainer.seed.x.y", "hydra",
    "hydra.run.dir", "hydra/launcher", "defaults", "data/train_files", "_target_", "model.path", "model/hf", "x" * 5000,
    "trainer.__class__", "trainer.model_config", "data.reward_kwargs", "schlüssel", "trainer.größe", "trainer.seed@x",
    "custom_reward_function.reward_kwargs.a", "custom_reward_function.reward_kwargs.a.b",
    "custom_reward_function.reward_kwargs.", f"{ROLLOUT}.engine_kwargs.vllm.a.b", f"{ROLLOUT}.engine_kwargs.vllm",
    "data.apply_chat_template_kwargs.x", "actor_rollout_ref.model.override_config.a.b.c", "critic.optim.lr",
    "trainer.logger[0]", "trainer.logger.0", "[0]", "trainer[seed]", "${trainer.seed}", "trainer.${trainer.seed}",
]  # fmt: skip
PREFIXES = [*[""] * 24, *["+", "++"] * 3, "~", "-", "--", "+++", " "]


def mutated(text: str, rng: random.Random) -> str:
    """One slip of the finger: a character too few, too many, twice, exchanged or of another kind."""
    if not text:
        return text
    at = rng.randrange(len(text))
    new = rng.choice("abz_.-=:,@ [{'\"$~1é")
    return rng.choice(
        [
            text[:at] + text[at + 1 :],
            text[:at] + new + text[at:],
            text[:at] + new + text[at + 1 :],
            text[:at] + text[at] + text[at:],
            text[:at] + text[at:][:2][::-1] + text[at + 2 :],
            text.upper(),
            text[:at],
        ]
    )


def broken_override(rng: random.Random) -> str:
    kind, leaf = rng.random(), rng.choice(leaf_keys())
    if kind < 0.5:
        key, value = leaf, rng.choice(VALUES)
    elif kind < 0.65:
        key, value = mutated(leaf, rng), rng.choice(["1", "x", *VALUES])
    elif kind < 0.75:
        group = rng.choice(list(GRPO.group_options()))
        value = rng.choice([mutated(rng.choice(GRPO.group_options()[group]), rng), *VALUES])
        return f"{rng.choice(PREFIXES)}{group}={value}"
    elif kind < 0.85:
        key, value = rng.choice(section_keys()), rng.choice(VALUES)
    elif kind < 0.95:
        key, value = rng.choice(KEYS), rng.choice(VALUES)
    else:
        return mutated(f"{leaf}={rng.choice(VALUES)[:50]}", rng)
    return f"{rng.choice(PREFIXES)}{key}={value}"


def broken_command_line(seed: int) -> list[str]:
    """A good command line with one to three things wrong, in any order."""
    rng = random.Random(seed)
    line = [*rng.choice(VALID), *(broken_override(rng) for _ in range(rng.choice([1, 1, 1, 2, 3])))]
    if rng.random() < 0.1:
        line.append(rng.choice(line))
    if rng.random() < 0.1:
        line.append(mutated(rng.choice(line), rng))
    rng.shuffle(line)
    return line


def named(message: str, line: list[str]) -> bool:
    names = [override.strip().lstrip("+~- ").partition("=")[0] for override in line]
    parts = [part for name in names for part in (name[:60], name.rpartition(".")[2][:60])]
    return any(part and part in message for part in parts) or "" in names or "key=value" in message


def outcome(line: list[str]) -> str:
    """ "loads", or the message; whatever else happens is raised."""
    try:
        config, notes = load_config(line)
    except ConfigError as error:
        return str(error)
    assert read_back(readable_config(config)).model_dump() == config.model_dump()
    assert format_plan(config, notes).encode()
    assert format_summary(config, notes).encode()
    return "loads"


@pytest.mark.deep
@pytest.mark.parametrize("part", [0, *(pytest.param(p, marks=pytest.mark.long) for p in range(1, PARTS))])
def test_a_broken_command_line_loads_or_is_told(part: int) -> None:
    outcomes = []
    for seed in range(part, CASES, PARTS):
        line = broken_command_line(seed)
        case = f"case {seed}: {[override[:200] for override in line]}"
        try:
            message = outcome(line)
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {str(error)[:500]}") from error
        outcomes.append(message == "loads")
        if message != "loads":
            assert "problem" in message.splitlines()[0], case
            assert named(message, line), f"{case}: {message[:1000]}"
            assert len(message) < LONGEST_MESSAGE, case
            assert "\x00" not in message, case
    assert 0 < sum(outcomes) < len(outcomes) / 2, "both kinds of outcome are tried"
