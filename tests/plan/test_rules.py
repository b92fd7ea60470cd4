"""Rules between keys, sizes and processes: each is broken once, and the message names the keys and values."""

from pathlib import Path

import pytest

from grpo_dist.config.load import readable_config
from grpo_dist.errors import ConfigError
from grpo_dist.plan.placement import placement
from grpo_dist.plan.roles import roles_of
from grpo_dist.plugins.names import WEIGHTED_FUNCTION
from tests.config.read_back import read_back
from tests.messages import refuses, says
from tests.plan.asked import load, notes, overrides, refused, rows

RULES = """
# the method
rollout.n=1 | adv=grpo  2
algorithm.min_group_size=9 | rollout.n=8  null
algorithm.min_group_size=1 | adv=grpo  2 or more
critic.enable=true | adv=grpo  gae
| critic.loss_agg_mode=prompt-mean  token-mean | adv=gae  actor.loss_agg_mode=prompt-mean
algorithm.mask_equal_groups=true  adv=reinforce_plus_plus_baseline | false
actor.observation_coeff=0.1 | loop=single_turn_agent  0
adv=gigpo | single_turn_agent  grpo
algorithm.credit=agent | single_turn_agent  episode
algorithm.credit=agent  adv=remax | episode | TOOLS
algorithm.kl_penalty=unbiased_k3 | k3
# a geometric mean has one advantage for a response: those of its agents, turns, steps or tokens cancel
loss=geo_mean  algorithm.credit=agent | gspo | TOOLS
loss=geo_mean  adv=gae | gspo
loss=geo_mean  adv=reinforce_plus_plus | gspo | algorithm.gamma=0.9
loss=geo_mean  adv=remax | gspo | algorithm.use_kl_in_reward=true  actor.use_kl_loss=false
actor.top_entropy_quantile=0.2  loss=geo_mean
# gdpo, and the parts of a reward that it would not see
algorithm.use_kl_in_reward=true  adv=gdpo | actor.use_kl_loss=true | gdpo_reward_keys=[acc,style]
adv=gdpo | gdpo_reward_keys=null  custom_reward_function.path=null  grpo_dist.rewards.weighted
reward.overlong_buffer.enable=true  gdpo_reward_keys=[acc,style] | overlong_penalty | adv=gdpo
gdpo_reward_keys=[] | null | adv=gdpo
| gdpo_reward_keys  acc twice | adv=gdpo  gdpo_reward_keys=[acc,style,acc]
gdpo_reward_keys=[acc,style] | gdpo_reward_weights=[1.0,2.0,3.0] | adv=gdpo  gdpo_reward_weights=[1,2,3]
# corrections for the sampler
correction.bypass_mode=true  correction.rollout_is_batch_normalize=true | | correction.loss_type=reinforce
correction.loss_type=reinforce | correction.bypass_mode=false
correction.loss_type=reinforce  loss=gspo | | correction.bypass_mode=true
correction.rollout_rs=token_k1 | correction.rollout_rs_threshold=null  both
correction.bypass_mode=true  actor.top_entropy_quantile=0.2
correction.bypass_mode=true  adv=rl_zvp | false
correction.m2_threshold=0.04  correction.bypass_mode=true | null
correction.m2_threshold=0.04  loss=gspo | null
# names of others
| algorithm.opsm_delta  correction.off_policy_mask_threshold | algorithm.opsm_delta=0.1
| algorithm.use_opsm  correction.off_policy_mask_threshold=0.5 | algorithm.use_opsm=true
| algorithm.use_unbiased_kl  actor.kl_loss_type=unbiased_k3 | algorithm.use_unbiased_kl=true
| algorithm.use_bias_correction_kl  actor.kl_loss_type=unbiased_k3 | algorithm.use_bias_correction_kl=true
# what ends a run, and what it resumes from
trainer.health.kl.action=stop  actor.use_kl_loss=false
trainer.health.rollout_mismatch.action=stop  correction.bypass_mode=true
trainer.health.entropy.action=stop  correction.bypass_mode=true | actor.entropy_coeff=0.0
trainer.resume_mode=resume_path | trainer.resume_from_path=null  global_step_N  resume_mode=auto
trainer.test_freq=-1 | trainer.stop_at.metric=val-core/x  data.val_files and trainer.test_freq \
    | trainer.stop_at={metric: val-core/x, value: 0.9}
| trainer.stop_at={metric:val-core/x}  {value: ...} | trainer.stop_at={metric: val-core/x}
| trainer.stop_at=high  a number | trainer.stop_at={metric: val-core/x, value: high}
trainer.keep_best_metric=val-core/x | data.val_files and trainer.test_freq | data.val_files=null
sandbox.backend=docker | sandbox.image=null
sandbox.image=python:3.12 | sandbox.backend=bubblewrap
# prompts, samples and their lengths
rollout.min_tokens=65 | data.max_response_length=64
rollout.agent.endpoint_host=0.0.0.0 | rollout.agent.endpoint_advertised_host=null  auto
rollout.val_kwargs.do_sample=true | rollout.val_kwargs.temperature=0.0  do_sample=false \
    | rollout.val_kwargs.temperature=0
rollout.over_sample_rate=0.5  algorithm.filter_groups.enable=true
data.sampler.class_name=Mine | data.sampler.class_path=null
| data.sampler.class_path=gone.py:  file | data.sampler.class_path=gone.py  data.sampler.class_name=Mine
data.sampler.class_path=my.module:Mine  data.curriculum.enable=true | null  false
| loop=gone.py  file | loop=gone.py:Loop
loop=tool_agnt | single_turn_agent  tool_agent
loop=external  data.apply_chat_template=false
# weights
actor.kl_loss_type=full  model.target_modules=[q_proj,lm_head] | low_var_kl  lm_head out | model.lora_rank=4
trainer.max_staleness=2  ref.ref_model_sync_steps=2
# a reward model, which may be retrained
reward_model.enable=true | reward_model.model.path=null
reward_model.max_length=100000 | max_position_embeddings | SCORER
reward_model.process.enable=true | reward_model.enable=false
reward_model.process.good=+ | reward_model.process.bad=null | SCORER  reward_model.process.enable=true
custom_reward_function.path=grpo_dist.rewards.reward_model | reward_model.enable=false
| reward_model.enable=false  grpo_dist.rewards.reward_model | custom_reward_function.path=grpo_dist.rewards.weighted  \
    custom_reward_function.reward_kwargs={functions: [{path: grpo_dist.rewards.reward_model}]}
custom_reward_function.path=null | reward_model.retrain.freq=5  grpo_dist.rewards.weighted | RETRAINED
trainer.max_staleness=1 | reward_model.retrain.freq=5 | RETRAINED  ref.ref_model_sync_steps=-1
| reward_model.retrain.freq=5  adv=grpo  grpo_process | RETRAINED  reward_model.process.enable=true
adv=grpo_process | reward_model.retrain.freq=5  reward_model.process.enable=false  -1 | RETRAINED
# a critic
| critic.model.path=builtin:tiny-qwen3  100 positions  critic.model.override_config | recipe=ppo  \
    +critic.model.override_config.max_position_embeddings=100
critic.ppo_mini_batch_size=5 | data.train_batch_size=32  ppo_mini_batch_size=4 | recipe=ppo
cluster.critic_world_size=3 | critic.ppo_mini_batch_size=32  3 critic ranks | recipe=ppo
critic.model.fsdp_config.fsdp_size=3 | cluster.critic_world_size=null  2 critic ranks | recipe=ppo
critic.ppo_max_token_len_per_gpu=100 | 128 | recipe=ppo  critic.use_dynamic_bsz=true  \
    critic.forward_max_token_len_per_gpu=200
# a reference of another model
| adv=distill  ref.model.path=null | recipe=distill
TEACHER | actor.use_kl_loss=false  algorithm.use_kl_in_reward=false | recipe=cispo
TEACHER  ref.ref_model_sync_steps=2 | -1
actor.kl_loss_type=full | builtin:tiny-qwen3  k2 | ref.model.path={a: builtin:tiny-qwen3, b/c: builtin:tiny-qwen3}
TEACHER | 100 positions  ref.model.override_config | +ref.model.override_config.max_position_embeddings=100
# a teacher behind an endpoint
| endpoint.model  /models | recipe=distill  endpoint.base_url=http://teacher:8000/v1
endpoint.base_url=teacher:8000 | http:// | TAUGHT
actor.kl_loss_type=k2 | endpoint.base_url=http://teacher:8000/v1  full | TAUGHT
algorithm.use_kl_in_reward=true | endpoint.base_url=http://teacher:8000/v1  false | TAUGHT
| endpoint.base_url=http://teacher:8000/v1  ref.model.path  null | TAUGHT  TEACHER
ref.ref_model_sync_steps=1 | endpoint.base_url=http://teacher:8000/v1  -1 | TAUGHT
algorithm.self_distillation.enable=true | endpoint.base_url=http://teacher:8000/v1 | TAUGHT
loop=external | endpoint.base_url=http://teacher:8000/v1  tool_agent | TAUGHT
# a policy that teaches itself needs a loss and something to show
actor.use_kl_loss=false | algorithm.self_distillation.enable=true  true | recipe=sdpo
algorithm.use_kl_in_reward=true | algorithm.self_distillation.enable=true  false | recipe=sdpo
loop=external | algorithm.self_distillation.enable=true  tool_agent | recipe=sdpo
algorithm.self_distillation.success_threshold=null | algorithm.self_distillation.feedback_name=null | recipe=sdpo
rollout.n=1 | algorithm.self_distillation.feedback_name=null | recipe=sdpo
algorithm.self_distillation.success_template=look | {text} | recipe=sdpo
algorithm.self_distillation.feedback_template=look | {text} | recipe=sdpo
# what must divide
data.train_batch_size=48  actor.ppo_mini_batch_size=32 | ppo_mini_batch_size=24
data.train_batch_size=16  actor.ppo_mini_batch_size=32 | ppo_mini_batch_size=16
actors=3 | actor.ppo_mini_batch_size=32  rollout.n=8  32 * 8  256
TP=2  engines=3 | processes
TP=2  engines=3 | GPUs | GPU8
gpus=6  TP=4 | 1 or 2 or 3 or 6 | cluster=multi_node  nodes=8
fsdp_size=3 | actors=null  2 actor  divisor  -1
# ranks that split sequences
actors=4  ulysses=3 | 1 or 2 or 4 | actor.use_kl_loss=false  data.train_batch_size=48
actors=6  ulysses=2 | actor.ppo_mini_batch_size=32  256  3 actor groups | refs=2  rollout.n=8
refs=3 | ref.ulysses_sequence_parallel_size=2  1 or 3 | actors=4  ulysses=2
ulysses=2  model.use_remove_padding=false | 1 | ref.ulysses_sequence_parallel_size=1
actor.ppo_max_token_len_per_gpu=63 | 128  2 ranks  64 | ulysses=2  actor.use_dynamic_bsz=true
# machines are not crossed by a copy of the weights, nor by an engine
gpus=6  fsdp_size=8 | 4  -1 | cluster=multi_node  nodes=4  actors=16
gpus=4  actors=6  engines=2  fsdp_size=3  TP=2 | refs=null  rollout  cluster.* | cluster=multi_node  nodes=2  \
    actor.use_kl_loss=false  data.train_batch_size=48  actor.ppo_mini_batch_size=48
gpus=6  fsdp_size=4  actors=12  TP=2 | engines=null  refs=null  actor, rollout, ref  cluster.* | cluster=multi_node  \
    nodes=2  data.train_batch_size=36  actor.ppo_mini_batch_size=36  cluster.colocate=all
# GPUs that there are, and roles that share them
gpus=2  refs=1 | cluster.colocate=null  TP=1  nodes=1  actor 1 + rollout 1 + ref 1 = 3  cluster.actor_world_size  \
    cluster.rollout_world_size  cluster.colocate=all | cluster=node8
actors=2 | engines=1  refs=1  cluster.colocate=null  nodes=1  TP=1  gpus=1  actor 2 = 2 | cluster=single_gpu
cluster.colocate=all  actors=2  engines=4 | refs=null  actor 2, rollout 4, ref 2  cluster.actor_world_size to 4  \
    others to 2 | GPU8
cluster.colocate=actor_ref  refs=2 | 4  null | GPU8
# engines that join
engines=2  cluster.max_rollout_world_size=1 | null
TP=2  cluster.max_rollout_world_size=5 | | cluster.num_cpus_per_worker=1
cluster.max_rollout_world_size=2 | null  colocate=actor_ref | cluster=single_gpu
cluster.max_rollout_world_size=2 | cluster.num_cpus_per_worker=null
sync.backend=ipc  cluster.max_rollout_world_size=2 | null | cluster.num_cpus_per_worker=1
# how weights get there
sync.backend=broadcast | gpus=1  NCCL  null, ipc or object_store | cluster=single_gpu
sync.backend=ipc | gpus=8  null | cluster=node8
sync.backend=ipc  nodes=2 | null | ray_kwargs.ray_init.address=auto
sync.changes_only=true | sync.backend=null  object_store | cluster=node8
sync.changes_only=true  sync.backend=ipc | object_store
sync.changes_only=true  rollout.name=pkg.engine:Engine | false
rollout.free_cache_engine=true  trainer.max_staleness=1 | false  0 | cluster=single_gpu
# what a pass must hold
rollout.max_num_batched_tokens=127  rollout.max_num_seqs=128 | raise  lower | cluster=node8
rollout.max_num_batched_tokens=127  rollout.max_num_seqs=129 | raise  lower
rollout.max_model_len=127 | data.max_prompt_length=64  data.max_response_length=64  prompt + response = 128
actor.ppo_max_token_len_per_gpu=100 | data.max_prompt_length=64  data.max_response_length=64  prompt + response = 128 \
    | actor.use_dynamic_bsz=true
ref.log_prob_max_token_len_per_gpu=127 | data.max_prompt_length=64  data.max_response_length=64  \
    prompt + response = 128 | ref.log_prob_use_dynamic_bsz=true
model.enable_activation_offload=true | model.enable_gradient_checkpointing=false
critic.model.enable_activation_offload=true | critic.model.enable_gradient_checkpointing=false | recipe=ppo
# values out of bounds
correction.m2_threshold=0
correction.off_policy_mask_threshold=0
data.curriculum.decay=0
data.curriculum.decay=1.5
data.curriculum.exploration=-0.1
data.curriculum.exploration=1.1
data.curriculum.max_pass_rate=0
data.curriculum.enable=pools
# the type of the output layer has one key
| hf_overrides  model.override_config | +vllm.hf_overrides={head_dtype: bfloat16}
model.head_dtype=bf16 | fp32
model.head_dtype=fp16 | float32
model.head_dtype=null | model.override_config={head_dtype:bfloat16} | +model.override_config.head_dtype=bfloat16
model.head_dtype=fp32 | model.override_config={head_dtype:bfloat16} | +model.override_config.head_dtype=bfloat16
model.head_dtype=fp32  actor.fsdp_config.model_dtype=bf16 | null
"""
LEGAL = """
GPU8  actors=4  engines=2  refs=2
rollout.val_kwargs.n=4  rollout.val_kwargs.do_sample=true  rollout.n=2  algorithm.min_group_size=2
rollout.max_model_len=96  data.max_prompt_length=32  data.max_response_length=64  rollout.min_tokens=64  \
    reward.overlong_buffer.enable=true  reward.overlong_buffer.len=64
actor.ppo_max_token_len_per_gpu=1  fsdp_size=2  algorithm.min_group_size=8
actor.use_dynamic_bsz=true  actor.ppo_max_token_len_per_gpu=128  data.apply_chat_template=false
adv=my.module:single  rollout.n=1  data.sampler.class_path=pkg://my.module  data.sampler.class_name=Mine
data.prompt_template='{question}'  data.prompt_key=prompt  actor.kl_loss_type=unbiased_k3
rollout.agent.endpoint_host=0.0.0.0  rollout.agent.endpoint_advertised_host=host.docker.internal
algorithm.credit=agent  adv=grpo_process  TOOLS
adv=gigpo  TOOLS
model.lora_rank=4  model.target_modules=[q_proj,lm_head]  model.exclude_modules=[lm_head]  actor.kl_loss_type=full
loss=geo_mean  adv=reinforce_plus_plus
loss=geo_mean  adv=remax  algorithm.min_group_size=1
correction.bypass_mode=true  correction.off_policy_mask_threshold=0.5  correction.rollout_rs=token_kpop  \
    correction.rollout_rs_threshold=0.1
correction.m2_threshold=0.04  correction.rollout_rs=token_kpop  correction.rollout_rs_threshold=0.1
adv=gdpo  gdpo_reward_keys=[acc,style]  gdpo_reward_weights=[1,2]
adv=gdpo  gdpo_reward_keys=[acc,overlong_penalty]  reward.overlong_buffer.enable=true
adv=gdpo  custom_reward_function.path=grpo_dist.rewards.weighted  reward.overlong_buffer.enable=true
RETRAINED
rollout.max_num_batched_tokens=1  rollout.max_num_seqs=128
rollout.max_num_batched_tokens=1  rollout.max_num_seqs=128  rollout.enable_chunked_prefill=false  GPU8
TP=2  vllm.distributed_executor_backend=mp  vllm.pipeline_parallel_size=1
TP=2  GPU8  vllm.enable_prefix_caching=false  vllm.async_scheduling=false
"""
NOTED = """
actor.kl_loss_type=k1
actor.kl_loss_type=kl
rollout.min_p=0.1
rollout.min_tokens=5
rollout.top_k=20
rollout.over_sample_rate=0.2
trainer.max_staleness=2 | | correction.rollout_is=null
correction.bypass_mode=true  correction.rollout_is=token
| reward_model.enable=false | reward_model.model.path=some/model
critic.enable=false | | recipe=ppo
| resume_mode=auto | trainer.resume_from_path=x
| actor | cluster=single_gpu  rollout.gpu_memory_utilization=0.8
cluster.colocate=actor_ref | trainer.max_staleness=0  all  verl  1 | GPU8
trainer.save_freq=7  trainer.test_freq=5 | | trainer.keep_best_metric=val-core/x
vllm.quantization=fp8 | training/rollout_probs_diff_*  algorithm.rollout_correction
vllm.kv_cache_dtype=fp8 | training/rollout_probs_diff_*  algorithm.rollout_correction
vllm.logits_processors=[mine:Processor] | training/rollout_probs_diff_*  algorithm.rollout_correction
vllm.watermark_config={algorithm:kgw} | training/rollout_probs_diff_*  algorithm.rollout_correction
"""
SILENT = """

actor.kl_loss_type=k1  actor.use_kl_loss=false  trainer.stop_at={metric: val-core/x, value: 0.9}
trainer.max_staleness=2
trainer.max_staleness=2  rollout.partial_rollout=false  rollout.clear_kv_cache_on_update=false
trainer.keep_best_metric=val-core/x  trainer.test_freq=5  trainer.save_freq=10
trainer.keep_best_metric=val-core/x  trainer.save_freq=-1  trainer.save_interval_minutes=5
GPU8  trainer.max_staleness=1
GPU8  cluster.colocate=all  rollout.free_cache_engine=true
vllm.quantization=null  vllm.kv_cache_dtype=auto  vllm.logits_processors=[]  vllm.watermark_config=null
vllm.enable_prefix_caching=false  vllm.async_scheduling=false  vllm.max_logprobs=5  vllm.block_size=32
"""
# Arguments of vLLM that have a key of the config, or that the trainer must rely on, by what to do instead.
OWNED = {
    "rollout.tensor_model_parallel_size": "tensor_parallel_size=2  pipeline_parallel_size=2  nnodes=2  "
    "prefill_context_parallel_size=2",
    "cluster.rollout_world_size": "data_parallel_size=2",
    "model.path": "model=other  hf_config_path=other  tokenizer=other  tokenizer_mode=slow",
    "model.override_config": "hf_overrides={max_position_embeddings:4096}",
    "rollout.stop": "skip_tokenizer_init=true",
    "rollout.dtype": "dtype=float16",
    "rollout.max_model_len": "max_model_len=64",
    "rollout.temperature": "generation_config=auto  override_generation_config={temperature:0.5}",
    "trainer.seed": "seed=1",
    "actor.router_replay.mode=R3": "enable_return_routed_experts=true",
    "mp": "distributed_executor_backend=ray",
    "out": "enable_expert_parallel=true  enable_eplb=true  logprobs_mode=raw_logprobs",
}


@pytest.mark.parametrize(("run", "parts"), rows(RULES))
def test_what_is_refused(run, parts):
    says(refused(*run), *parts)


@pytest.mark.parametrize("run", LEGAL.strip().splitlines())
def test_legal_settings_pass(run):
    assert load(run)


@pytest.mark.parametrize(("run", "parts"), rows(NOTED))
def test_what_is_noted(run, parts):
    (note,) = notes(*run)
    says(note, *parts)


@pytest.mark.parametrize("run", SILENT.splitlines()[1:])
def test_what_has_no_notes(run):
    assert notes(run) == []


def test_arguments_of_vllm_that_belong_to_others_are_refused_with_what_to_do():
    given = {part: key for key, row in OWNED.items() for part in overrides(*(f"vllm.{each}" for each in row.split()))}
    with pytest.raises(ConfigError) as caught:
        load(*given)
    told = str(caught.value).splitlines()[1:]
    assert len(told) == len(given)
    for override, key in given.items():
        says(told, override, *overrides(key))


# --- files, code and packages ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "setting", ["custom_reward_function.path=gone/reward.py", "algorithm.adv_estimator=gone.py:mine"]
)
def test_missing_code_is_a_problem_in_a_run_and_a_note_in_a_dry_run_of_the_config(setting):
    (key,) = overrides(setting.partition(":")[0])
    for dry_run in ("false", "true"):
        says(refused(setting, "data=arithmetic", f"trainer.dry_run={dry_run}"), key, "file", Path.cwd())
    says(notes(setting, "data=arithmetic", "trainer.dry_run=config"), key, "file")


def test_a_dry_run_of_the_config_says_that_it_does_not_try_code(tmp_path):
    (tmp_path / "mine.py").touch()
    plain, dry = "data=arithmetic", "data=arithmetic  trainer.dry_run=config"
    named = f"algorithm.adv_estimator={tmp_path}/mine.py:mine"
    says(notes(named, dry), named, "trainer.dry_run=true")
    functions = [f"{tmp_path}/mine.py:{name}" for name in ("right", "short")]
    says(notes(f"custom_reward_function.path=[{','.join(functions)}]", dry), *functions)
    assert "trainer.dry_run=true" not in "".join([*notes(named, plain), *notes(dry)])
    two = f"cluster=multi_node  {plain}"
    says(notes(two), "trainer.nnodes=2", "trainer.default_local_dir=outputs/grpo_dist/run")
    assert "default_local_dir" not in "".join(notes(two, f"trainer.default_local_dir={tmp_path}"))


TORCHAO = ("torchao", "pip install 'torchao>=0.18,<0.19'")


@pytest.mark.parametrize(
    ("setting", "package", "parts"),
    [
        ("rollout.name=vllm", "vllm", ["pip install -e '.[cpu]'", "'.[gpu]'"]),
        ("critic.optim.optimizer=AdamW8bit", "torchao", TORCHAO),
        ("reward_model.retrain.model_dtype=bf16", "torchao", TORCHAO),
    ],
)
def test_a_missing_package_is_told_before_anything_starts(setting, package, parts, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    load(setting)
    monkeypatch.setattr("grpo_dist.plan.rules.find_spec", lambda name: None if name == package else name)
    says(refused(setting), *overrides(setting), *parts)
    says(notes(setting, "trainer.dry_run=config"), *overrides(setting), *parts)
    load(setting, "ray_kwargs.ray_init.address=10.0.0.1:6379")
    if package == "torchao":
        load()


# --- what a config asks for ------------------------------------------------------------------------------------------
def test_a_critic_comes_with_gae_and_follows_the_actor_where_its_own_keys_are_not_set():
    asked = ("recipe=ppo", "algorithm.adv_estimator=gae", "algorithm.adv_estimator=gae  critic.enable=false", "")
    assert [load(run).needs_critic for run in asked] == [True, True, False, False]
    critic = load("recipe=ppo  actor.ppo_epochs=2  actor.shuffle=true  critic.ppo_epochs=3").critic
    assert (critic.ppo_epochs, critic.shuffle, critic.model.path) == (3, True, "builtin:tiny-qwen3")


def test_with_lora_a_teacher_is_a_reference_of_its_own():
    """And what is wrong with it is not said of the policy without its factors. No ranks hold one that is elsewhere."""
    lora = "model.lora_rank=2"
    assert load(lora).actor_is_reference
    taught = load(lora, "TEACHER")
    assert (taught.actor_is_reference, taught.needs_reference_workers) == (False, True)
    message = refused(lora, "TEACHER  ref.ref_model_sync_steps=2")
    says(message, "actor_rollout_ref.ref.model.path")
    assert "factors" not in message
    for run in ("TAUGHT", f"TAUGHT  {lora}"):
        config = load(run)
        assert (config.needs_reference, config.actor_is_reference) == (True, False)
        assert "ref" not in [row.name for row in roles_of(config)]


def test_a_policy_that_teaches_itself_needs_no_other_teacher():
    config = load("recipe=sdpo  trainer.max_staleness=1")
    assert config.algorithm.self_distillation.enable
    assert config.needs_reference_workers
    assert config.reward_function is None, "rows need a scorer"
    said = "algorithm.self_distillation.success_threshold=null  algorithm.self_distillation.feedback_name=hint"
    assert load("recipe=sdpo  rollout.n=1", said).reward_function == "grpo_dist.rewards.optional"
    replays = "actor.router_replay.mode=R3"  # the experts are those of another prompt; beside it: there are none
    with refuses(ConfigError, f"algorithm.self_distillation.enable=true, {overrides(replays)[0]}", "disabled"):
        load("recipe=sdpo", replays)


def test_ranks_that_split_sequences_count_as_one():
    config = load(
        "data.train_batch_size=3  actor.ppo_mini_batch_size=3  rollout.n=3  cluster.actor_world_size=6",
        "actor.use_dynamic_bsz=true  actor.ppo_max_token_len_per_gpu=64  actor.ulysses_sequence_parallel_size=2",
        "recipe=ppo  cluster.critic_world_size=2",
    )
    place = placement(config)
    assert [place.row_groups(config, role) for role in ("actor", "ref", "critic", "reward_model")] == [3, 1, 1, 1]
    budgets = [limits.max_token_len for row in roles_of(config) for limits in row.passes(config)]
    assert budgets == [128] * 5, "of actor, reference and critic"
    by_default = placement(load("actor.ulysses_sequence_parallel_size=4"))
    assert (by_default.actor_world_size, by_default.world_sizes["ref"]) == (4, 4)


# --- what is given to vLLM as it is -----------------------------------------------------------------------------------
def test_the_type_of_the_output_layer_is_float32_or_that_of_the_others() -> None:
    assert [load(run).actor_rollout_ref.model.head_dtype for run in ("model.head_dtype=float32", "")] == ["fp32", None]


def test_engines_that_record_no_experts_have_none_to_replay(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 8}')
    replay, path = "actor.router_replay.mode=R3", f"model.path={tmp_path}"
    for why in ("vllm.enable_prefix_caching=false", "vllm.scheduler_cls=my.Scheduler"):
        says(refused(path, replay, why), *overrides(replay, why), "leave")
        load(path, why)
    own = "rollout.name=my.engines:Engine"
    says(refused(path, replay, own), *overrides(replay, own), "disabled")


@pytest.mark.parametrize("argument", ["spec_method=ngram", "spec_tokens=3", "speculative_config={method:ngram}"])
def test_drafts_are_refused_with_seeded_samples_and_noted_otherwise(argument: str) -> None:
    given, (key,) = f"vllm.{argument}", overrides(f"vllm.{argument.partition('=')[0]}")
    default, asked = overrides("rollout.deterministic=null", "rollout.deterministic=true")
    says(refused(given), key, default, "CPU", "deterministic=false")
    says(refused("cluster=node8", given, asked), key, asked, "deterministic=false")
    for where in ("rollout.deterministic=false", "cluster=node8"):
        says(notes(where, given), key, "seeds")
    load(f"{key}=null")


# --- one reward function or a list of them: how they are named -------------------------------------------------------
PATH, NAME, WEIGHTS, KWARGS = (f"custom_reward_function.{key}" for key in ("path", "name", "weights", "reward_kwargs"))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file rewards.py in the current folder; its absolute path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").touch()
    return f"{tmp_path}/rewards.py"


def test_one_function(file: str) -> None:
    for prefix in ("", "file://"):
        named = load(f"{PATH}={prefix}rewards.py:correct", f"{KWARGS}={{a: 1}}")
        assert named.reward_code == (f"{file}:correct", "correct", {"a": 1})
        assert load(f"{PATH}={prefix}rewards.py", f"{NAME}=correct").reward_code == (file, "correct", {})
    assert load(f"{PATH}=my_package.rewards:correct").reward_code[0] == "my_package.rewards:correct"
    assert load().reward_code == (None, "compute_score", {})


def test_a_list_is_a_weighted_sum_and_an_entry_may_say_more(file: str) -> None:
    config = load(f"{PATH}=[rewards.py:correct,pkg.rewards:short,null]", f"{WEIGHTS}=[1,0.5,2]")
    path, name, reward_kwargs = config.reward_code
    assert (path, name) == (WEIGHTED_FUNCTION, "compute_score")
    first, second = {"path": f"{file}:correct", "weight": 1.0}, {"path": "pkg.rewards:short", "weight": 0.5}
    assert reward_kwargs["functions"] == [first, second, {"path": None, "label": "built_in", "weight": 2.0}]
    assert config.reward_paths == ("rewards.py", "pkg.rewards", None)
    assert config.needs_ground_truth
    assert read_back(readable_config(config)).reward_code == config.reward_code
    entry = "{path: rewards.py:short, weight: 0.5, label: brief, reward_kwargs: {limit: 9}}"
    functions = load(f"{PATH}=[rewards.py:correct,{entry}]").reward_code.reward_kwargs["functions"]
    more = {"weight": 0.5, "label": "brief", "reward_kwargs": {"limit": 9}}
    assert functions == [{"path": f"{file}:correct"}, {"path": f"{file}:short", **more}]


NAMINGS = """
F.path=rewards.py:correct  F.name=short
F.weights=[1.0] | path=[...] | F.path=rewards.py
| F.weights=[1.0]  rewards.py:b | F.path=[rewards.py:a,rewards.py:b]  F.weights=[1]
F.name=a | file.py:function | F.path=[rewards.py]
| F.reward_kwargs={x:1}  reward_kwargs: {...} | F.path=[rewards.py:a]  F.reward_kwargs={x: 1}
| F.weights=[2.0]  weights twice | F.path=[{path: rewards.py:a, weight: 1}]  F.weights=[2]
F.path=[] | 1
| F.path=rewrads.py:  file | F.path=[rewards.py:a,rewrads.py:b]
| F.path=rewrads.py:  file | F.path=rewrads.py:b
| F.path=1  text | F.path=[1]
| reward_model.enable=false | F.path=[grpo_dist.rewards.reward_model:compute_score]
data.sampler.class_path=rewards.py:Mine  data.sampler.class_name=Other
data.sampler.class_path=rewards.py | file.py:Class
""".replace("F.", "custom_reward_function.")


@pytest.mark.parametrize(("run", "parts"), rows(NAMINGS))
def test_namings_that_are_refused(run: list[str], parts: list[str], file: str) -> None:
    with refuses(ConfigError, *parts):
        load(*run)


def test_a_sampler_is_named_in_the_same_way(file: str) -> None:
    key, name = "data.sampler.class_path", "data.sampler.class_name"
    assert load(f"{key}=rewards.py:Mine").data.sampler.code == ("rewards.py", "Mine")
    assert load(f"{key}=rewards.py", f"{name}=Mine").data.sampler.code == ("rewards.py", "Mine")
    assert load().data.sampler.code is None
