"""Types, ranges and names of single keys; what null stands for."""

import re
import subprocess
import sys
from itertools import product

import pytest

from grpo_dist.algorithms.advantage import ADVANTAGE
from grpo_dist.algorithms.advantage import DEFAULTS as ADVANTAGE_OPTIONS
from grpo_dist.algorithms.kl import KL
from grpo_dist.algorithms.policy_loss import POLICY_LOSS
from grpo_dist.config import schema_job
from grpo_dist.config.keys import leaf_keys
from grpo_dist.config.load import load_command
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import GRPO, SFT, load_config
from grpo_dist.plan.plan import resolve
from grpo_dist.plugins import names
from grpo_dist.sizes import divisor_up_to
from tests.config.refusals import refused
from tests.messages import refuses, says

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
AGENT, RULES = f"{ROLLOUT}.agent", "trainer.health"


def load(*overrides):
    return load_config(list(overrides))[0]


def test_names_are_those_of_the_registries():
    assert sorted(names.ADV_ESTIMATORS) == ADVANTAGE.names()
    assert sorted(name for name in names.KL_LOSS_TYPES if not name.endswith("+")) == KL.names()
    assert sorted(names.LOSS_MODES) == POLICY_LOSS.names()
    assert {*names.GROUP_ADV_ESTIMATORS} == {each for each in ADVANTAGE.names() if "groups" in ADVANTAGE.needs(each)}
    assert {*names.TOKEN_SELECTING_LOSSES, *names.SEQUENCE_LOSSES} <= {*names.LOSS_MODES}
    given = load().algorithm.model_dump()
    assert {name: given[name] for name in ADVANTAGE_OPTIONS} == ADVANTAGE_OPTIONS, "of a function without options"


def test_what_may_be_written_in_several_ways(tmp_path):
    for text in ("1e-6", "1E-6", ".1e-5", "0.000001", "'1e-6'", '"1.0e-06"'):
        assert load(f"{ACTOR}.optim.lr={text}").actor_rollout_ref.actor.optim.lr == pytest.approx(1e-6, rel=1e-12)
    assert isinstance(load(f"{ACTOR}.optim.lr=1").actor_rollout_ref.actor.optim.lr, float)
    # One or several, names of one's own, and verl's of an optimizer, which are those of torch and torchao.
    config = load("trainer.logger=wandb", "data.val_files=[builtin:a,builtin:b]")
    assert config.trainer.logger == ("wandb",)
    assert config.data.val_files == ("builtin:a", "builtin:b")
    assert load("data.val_files=null").data.val_files == ()
    config = load(f"{AGENT}.endpoint_host='0:0::0'", f"{AGENT}.endpoint_advertised_host=fd00::5")
    assert config.actor_rollout_ref.rollout.agent.endpoint_host == "::"
    (mine := tmp_path / "mine.py").write_text("def estimator(): ...")
    name = f"{mine}:estimator"
    assert load(f"algorithm.adv_estimator={name}", f"{ACTOR}.kl_loss_type=a.b:k9").algorithm.adv_estimator == name
    for written, kept in (("AdamW", "AdamW"), ("_AdamW", "AdamW"), ("AdamW8bit", "AdamW8bit")):
        config = load(f"{ACTOR}.optim.optimizer={written}", f"critic.optim.optimizer={written}")
        assert {config.actor_rollout_ref.actor.optim.optimizer, config.critic.optim.optimizer} == {kept}


# What is said of a value beside its key <- the values.
REFUSED = {
    ("finite",): f"{ROLLOUT}.temperature=nan",
    ("less", "2"): f"{ROLLOUT}.temperature=2.5",
    ("less", "1"): f"{ROLLOUT}.top_p=1.01 {ACTOR}.optim.betas=[0.9,1.0] algorithm.gamma=1.5 "
    f"{RULES}.truncation.threshold=1.5",
    ("1",): f"{RULES}.agreement.steps=2",  # it is compared once
    ("greater", "0"): f"{ROLLOUT}.top_p=0 {ACTOR}.grad_clip=0 {ACTOR}.optim.lr=-1e-6 algorithm.lam=-1 "
    f"{RULES}.kl.threshold=-1",
    ("greater", "1"): f"{ROLLOUT}.n=0 {ACTOR}.clip_ratio_c=1 trainer.total_training_steps=0 trainer.profile_steps=[0] "
    f"{RULES}.grad_norm.factor=1",
    ("greater", "2"): f"{RULES}.grad_norm.window=1",
    ("warn, stop, off",): f"{RULES}.kl.action=halt",
    ("whole number",): f"{ROLLOUT}.n=8.0 {ROLLOUT}.n=true trainer.profile_steps=[2,1.5]",
    ("whole number", "null"): "trainer.seed=None",
    ("number",): f"{ACTOR}.grad_clip=null {ACTOR}.optim.lr=fast",
    ("-1", "1"): f"{ROLLOUT}.top_k=0 data.train_max_samples=0 trainer.test_freq=0",
    ("float32, bfloat16, float16",): f"{ROLLOUT}.dtype=int8",
    ("float32", "dtype"): f"{ACTOR}.fsdp_config.model_dtype=half trainer.export_dtype=float16",
    ("true", "config"): "trainer.dry_run=configs",
    ("true or false",): f"{ACTOR}.use_kl_loss=1",
    ("true or false", "quotes"): f"{ACTOR}.use_kl_loss='true'",
    ("quotes",): "trainer.experiment_name=7",
    ("few",): f"{ACTOR}.optim.betas=[0.9]",
    ("2 entries",): f"{ACTOR}.optim.betas=[0.9,0.9,0.9]",
    ("1 entry",): "data.train_files=[]",
    ("text",): "data.train_files=[3]",
    ("mapping",): "data.apply_chat_template_kwargs=3",
    ("empty",): f"{AGENT}.endpoint_host='' trainer.project_name=''",
    ("k1, kl, abs, k2, mse, k3, low_var_kl, k1+",): f"{ACTOR}.kl_loss_type=k4",
    ("'token-mean'?",): f"{ACTOR}.loss_agg_mode=token_mean",
    ("dppo_kl, clip_cov, kl_cov", "'vanilla'?"): f"{ACTOR}.policy_loss.loss_mode=vanila",
    ("pkg.module:function",): "algorithm.adv_estimator=my.module:",
    ("episode",): "algorithm.credit=turn",
    ("fixed",): "algorithm.kl_ctrl.type=moving",
    ("auto", "IP", "endpoint_advertised_host"): f"{AGENT}.endpoint_host=localhost {AGENT}.endpoint_host=10.0.0.5:80",
    ("http://",): " ".join(f"{AGENT}.endpoint_advertised_host={x}" for x in ("http://here", "10.0.0.5:80", "0.0.0.0")),
    ("jsonl, tensorboard, wandb, mlflow, trackio, prometheus", "'wandb'?"): "trainer.logger=[console,wandbb]",
    ("auto, disable, resume_path",): "trainer.resume_mode=never",
    ("[a,b]",): "trainer.profile_steps=3",
    ("null",): "trainer.profile_steps=[]",
    ("3 twice",): "trainer.profile_steps=[3,4,3]",
}


@pytest.mark.parametrize(("override", "parts"), [(each, parts) for parts in REFUSED for each in REFUSED[parts].split()])
def test_wrong_values_are_refused_with_key_and_value(override, parts):
    message = refused(override, "data=arithmetic")
    says(message, override.split("=")[0])
    says(message.replace(override, "", 1), *parts)


ON_POLICY = ("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=1")
CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ((), False),
        ((f"{ACTOR}.ppo_epochs=2",), True),
        ((f"{ACTOR}.ppo_mini_batch_size=4",), True),
        (("algorithm.use_kl_in_reward=true",), True),
        ((f"{CORRECTION}.rollout_is=token",), False),
        ((f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_batch_normalize=true"), True),
        (("trainer.max_staleness=1",), False),
        (("trainer.max_staleness=1", f"{ACTOR}.ppo_epochs=2"), True),
        ((f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=2"), True),
        ((f"{ACTOR}.top_entropy_quantile=0.2",), True),
        ((f"{ACTOR}.policy_loss.loss_mode=kl_cov",), True),
        ((f"{CORRECTION}.bypass_mode=true", f"{ACTOR}.ppo_epochs=2"), False),
    ],
)
def test_old_log_probs_are_computed_only_where_the_update_cannot_know_them(changes, needed):
    assert (load(*ON_POLICY, *changes).old_log_probs_from == "actor") == needed


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ((), None),
        (("trainer.max_staleness=2",), "token"),
        (("trainer.max_staleness=2", f"{CORRECTION}.rollout_is=null"), None),
        (("trainer.max_staleness=2", f"{CORRECTION}.rollout_is=sequence"), "sequence"),
        ((f"{CORRECTION}.rollout_is=token",), "token"),
        (("trainer.max_staleness=2", f"{CORRECTION}.bypass_mode=true"), None),  # the clipped ratio corrects
        (("trainer.max_staleness=2", f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce"), "token"),
    ],
)
def test_stale_responses_are_corrected_unless_told_otherwise(changes, expected):
    assert load(*changes).rollout_is == expected


@pytest.mark.parametrize(
    ("overrides", "bf16", "expected"),
    [
        ((), True, "fp32"),  # the built-in model
        (("model=smollm2_135m",), True, "bf16"),
        (("model=smollm2_135m",), False, "fp32"),
        (("cluster=node8", "model=smollm2_135m"), False, "bf16"),
    ],
)
def test_null_types_depend_on_the_machine(overrides, bf16, expected, monkeypatch):
    monkeypatch.setattr(schema_job, "has_bf16", lambda: bf16)
    config = load(*overrides)
    assert config.default_dtype == expected
    roles = resolve(config).actor_rollout_ref
    assert roles.actor.fsdp_config.dtype == expected
    assert roles.rollout.dtype == {"fp32": "float32", "bf16": "bfloat16"}[expected]


def test_types_and_determinism_that_are_asked_for():
    for where, expected in (((), True), (("cluster=node8",), False)):
        assert resolve(load(*where)).actor_rollout_ref.rollout.deterministic is expected
    asked = load(f"{ROLLOUT}.dtype=float16", f"{ROLLOUT}.deterministic=false", f"{ACTOR}.fsdp_config.dtype=bf16")
    roles = resolve(asked).actor_rollout_ref
    types = roles.rollout.dtype, roles.rollout.deterministic, roles.actor.fsdp_config.dtype
    assert types == ("float16", False, "bf16")
    assert resolve(resolve(asked)) == resolve(asked)


@pytest.mark.parametrize(
    ("written", "trained", "sampled"),
    [
        ("bfloat16 bf16", "bf16", "bfloat16"),
        ("float32 fp32 float", "fp32", "float32"),
        ("float16 fp16 half", "fp16", "float16"),
        ("null", None, None),
    ],
)
def test_every_name_of_a_type(written, trained, sampled):
    for name in written.split():
        assert load(f"{ROLLOUT}.dtype={name}").actor_rollout_ref.rollout.dtype == sampled
    sections = (f"{ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config")
    for name, key in product(written.split() if trained else [], ("dtype", "mixed_precision.param_dtype")):
        given = [f"+{section}.{key}={name}" for section in sections]
        held = "fp32" if trained == "fp16" else trained  # weights are never float16
        roles = load(*given, f"{sections[0]}.model_dtype={held}").actor_rollout_ref
        actor, ref = roles.actor.fsdp_config, roles.ref.fsdp_config
        assert (actor.dtype, ref.dtype, actor.model_dtype) == (trained, trained, held)


def test_nulls_of_lengths_seeds_reference_and_the_type_of_the_export():
    config = load("trainer.seed=7")
    assert (config.data_seed, config.needs_reference, config.max_model_len) == (7, True, 128)
    other = load("data.seed=3", f"{ACTOR}.use_kl_loss=false", f"{ROLLOUT}.max_model_len=200")
    assert (other.data_seed, other.needs_reference, other.max_model_len) == (3, False, 200)
    with refuses(ValueError, "seed", "frozen"):
        config.trainer.seed = 2
    assert load().export_dtype == "fp32"
    assert load(f"{ACTOR}.fsdp_config.dtype=bf16").export_dtype == "fp32", "computed in bf16, kept in fp32"
    assert load(f"{ACTOR}.fsdp_config.model_dtype=bf16").export_dtype == "bf16"
    assert load("trainer.export_dtype=bfloat16").export_dtype == "bf16"


def test_trls_loss_types_are_answered_with_the_aggregation_that_they_are():
    for written, meant in (("grpo", "seq-mean-token-mean"), ("dr_grpo", "seq-mean-token-sum-norm")):
        told = refused(f"{ACTOR}.loss_agg_mode={written}")
        assert len(re.findall(f"{meant}[;, ]", told)) == 2, "among all, and as what is meant"


# --- a slip of the finger: no check counts to a number of the user, or makes a list of that length --------------------
# In a process of its own, whose memory and time are limited: what goes wrong must not take the machine.
ALL_KEYS = """
import resource, signal, sys
from grpo_dist.config.keys import leaf_keys
from grpo_dist.config.load import load_command
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
for command in (GRPO, SFT, REWARD_MODEL):
    for key in leaf_keys(command.schema):
        for value in (10**10, 10**400):
            signal.alarm(20)
            try:
                load_command(["trainer.dry_run=config", "trainer.n_gpus_per_node=8", (key, value)], command)
            except ConfigError:
                pass
            except BaseException as error:
                sys.exit(f"{key}={value}: {type(error).__name__}: {error}")
"""


@pytest.mark.long
def test_all_keys() -> None:
    done = subprocess.run([sys.executable, "-c", ALL_KEYS], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]


def test_processes_and_machines_have_a_limit() -> None:
    limits = (GRPO, "trainer.nnodes", 4096), (GRPO, "trainer.n_gpus_per_node", 128), (SFT, "cluster.world_size", 524288)
    for command, key, most in limits:
        for value in (most + 1, 2**32):
            with refuses(ConfigError, f"{key}={value}", most):
                load_command(["trainer.dry_run=config", f"{key}={value}"], command)
    names = ("world_size", "num_workers", "nnodes", "n_gpus_per_node", "parallel_size")
    keys = [key for key in leaf_keys(GRPO.schema) if key.endswith(names)]
    assert len(keys) >= 11
    seeds = [(key, 2**63, key) for key in ("trainer.seed", "data.seed")]  # more than libraries can hold
    for key, value, part in [*((key, 10**10, "less") for key in keys), *seeds]:
        with refuses(ConfigError, key, part):
            load_command(["trainer.dry_run=config", f"{key}={value}"], GRPO)


def test_a_mini_batch_of_any_size_is_answered_at_once() -> None:
    size = "actor_rollout_ref.actor.ppo_mini_batch_size"
    for mini in (10**9, 10**10, 2**62):
        with refuses(ConfigError, "data.train_batch_size=48", "ppo_mini_batch_size=48"):
            load_command(["trainer.dry_run=config", "data.train_batch_size=48", f"{size}={mini}"], GRPO)
        load_command(["trainer.dry_run=config", f"data.train_batch_size={mini}"], GRPO)


def test_divisors() -> None:
    known = ((48, 32, 24), (48, 48, 48), (97, 96, 1), (100, 7, 5), (1, 1, 1), (2**40 * 3, 3, 3), (48, 10**18, 48))
    for number, most, divisor in (*known, (10**18, 10**9, 10**9)):
        assert divisor_up_to(number, most) == divisor
    found = divisor_up_to(2 * (10**9 + 7), 10**9)
    assert found <= 10**9
    assert 2 * (10**9 + 7) % found == 0
