"""Rules between batch sizes, lengths and processes: each is broken once, and the message names keys and values."""

from __future__ import annotations

import pytest

from grpo_dist.plan.placement import placement
from grpo_dist.plan.roles import roles_of
from tests.messages import says
from tests.plan.asked import load, notes, refused, rows

SPLIT = "actor.ulysses_sequence_parallel_size"
RULES = """
# what must divide
data.train_batch_size=48  actor.ppo_mini_batch_size=32 | ppo_mini_batch_size=24
data.train_batch_size=16  actor.ppo_mini_batch_size=32 | ppo_mini_batch_size=16
cluster.actor_world_size=3 | actor.ppo_mini_batch_size=32  rollout.n=8  32 * 8  256
rollout.tensor_model_parallel_size=2  cluster.rollout_world_size=3 | processes
rollout.tensor_model_parallel_size=2  cluster.rollout_world_size=3 | GPUs | GPU8
trainer.n_gpus_per_node=6  rollout.tensor_model_parallel_size=4 | 1 or 2 or 3 or 6 \
    | cluster=multi_node  trainer.nnodes=8
actor.fsdp_config.fsdp_size=3 | cluster.actor_world_size=null  2 actor  divisor  -1
cluster.actor_world_size=16  actor.fsdp_config.fsdp_size=12 | divisor  -1 | cluster=multi_node  trainer.nnodes=3
# ranks that split sequences
cluster.actor_world_size=4  actor.ulysses_sequence_parallel_size=3 | 1 or 2 or 4 \
    | actor.use_kl_loss=false  data.train_batch_size=48
cluster.actor_world_size=6  actor.ulysses_sequence_parallel_size=2 \
    | actor.ppo_mini_batch_size=32  256  3 actor groups | cluster.ref_world_size=2  rollout.n=8
cluster.ref_world_size=3 | ref.ulysses_sequence_parallel_size=2  1 or 3 \
    | cluster.actor_world_size=4  actor.ulysses_sequence_parallel_size=2
actor.ulysses_sequence_parallel_size=2  model.use_remove_padding=false | 1 | ref.ulysses_sequence_parallel_size=1
actor.ppo_max_token_len_per_gpu=63 | 128  2 ranks  64 \
    | actor.ulysses_sequence_parallel_size=2  actor.use_dynamic_bsz=true
# machines are not crossed by a copy of the weights, nor by an engine
trainer.n_gpus_per_node=6  actor.fsdp_config.fsdp_size=8 | 4  -1 \
    | cluster=multi_node  trainer.nnodes=4  cluster.actor_world_size=16
trainer.n_gpus_per_node=4  cluster.actor_world_size=6  cluster.rollout_world_size=2  actor.fsdp_config.fsdp_size=3  \
    rollout.tensor_model_parallel_size=2 | cluster.ref_world_size=null  rollout  cluster.* \
    | cluster=multi_node  trainer.nnodes=2  actor.use_kl_loss=false  data.train_batch_size=48  \
    actor.ppo_mini_batch_size=48
trainer.n_gpus_per_node=6  actor.fsdp_config.fsdp_size=4  cluster.actor_world_size=12  \
    rollout.tensor_model_parallel_size=2 \
    | cluster.rollout_world_size=null  cluster.ref_world_size=null  actor, rollout, ref  cluster.* \
    | cluster=multi_node  trainer.nnodes=2  data.train_batch_size=36  actor.ppo_mini_batch_size=36  cluster.colocate=all
# GPUs that there are, and roles that share them
trainer.n_gpus_per_node=2  cluster.ref_world_size=1 \
    | cluster.colocate=null  rollout.tensor_model_parallel_size=1  trainer.nnodes=1  actor 1 + rollout 1 + ref 1 = 3  \
    cluster.actor_world_size  cluster.rollout_world_size  cluster.colocate=all | cluster=node8
cluster.actor_world_size=2 \
    | cluster.rollout_world_size=1  cluster.ref_world_size=1  cluster.colocate=null  trainer.nnodes=1  \
    rollout.tensor_model_parallel_size=1  trainer.n_gpus_per_node=1  actor 2 = 2 | cluster=single_gpu
cluster.colocate=all  cluster.actor_world_size=2  cluster.rollout_world_size=4 \
    | cluster.ref_world_size=null  actor 2, rollout 4, ref 2  cluster.actor_world_size to 4  others to 2 | GPU8
cluster.colocate=actor_ref  cluster.ref_world_size=2 | 4  null | GPU8
# engines that join
cluster.rollout_world_size=2  cluster.max_rollout_world_size=1 | null
rollout.tensor_model_parallel_size=2  cluster.max_rollout_world_size=5 | | cluster.num_cpus_per_worker=1
cluster.max_rollout_world_size=2 | null  colocate=actor_ref | cluster=single_gpu
cluster.max_rollout_world_size=2 | cluster.num_cpus_per_worker=null
rollout.checkpoint_engine.backend=ipc  cluster.max_rollout_world_size=2 | null | cluster.num_cpus_per_worker=1
# how weights get there
rollout.checkpoint_engine.backend=broadcast | trainer.n_gpus_per_node=1  NCCL  null, ipc or object_store \
    | cluster=single_gpu
rollout.checkpoint_engine.backend=ipc | trainer.n_gpus_per_node=8  null | cluster=node8
rollout.checkpoint_engine.backend=ipc  trainer.nnodes=2 | null | ray_kwargs.ray_init.address=auto
rollout.checkpoint_engine.changes_only=true | rollout.checkpoint_engine.backend=null  object_store | cluster=node8
rollout.checkpoint_engine.changes_only=true  rollout.checkpoint_engine.backend=ipc | object_store
rollout.checkpoint_engine.changes_only=true  rollout.name=pkg.engine:Engine | false
rollout.free_cache_engine=true  trainer.max_staleness=1 | false  0 | cluster=single_gpu
# what a pass must hold
rollout.max_num_batched_tokens=127  rollout.max_num_seqs=128 | raise  lower | cluster=node8
rollout.max_num_batched_tokens=127  rollout.max_num_seqs=129 | raise  lower
rollout.max_model_len=127 | data.max_prompt_length=64  data.max_response_length=64  prompt + response = 128
actor.ppo_max_token_len_per_gpu=100 | data.max_prompt_length=64  data.max_response_length=64  \
    prompt + response = 128 | actor.use_dynamic_bsz=true
ref.log_prob_max_token_len_per_gpu=127 | data.max_prompt_length=64  data.max_response_length=64  \
    prompt + response = 128 | ref.log_prob_use_dynamic_bsz=true
model.enable_activation_offload=true | model.enable_gradient_checkpointing=false
critic.model.enable_activation_offload=true | critic.model.enable_gradient_checkpointing=false | recipe=ppo
"""
LEGAL = """
# where prompts are not cut a pass holds the longest sequence, of 128 tokens here
rollout.max_num_batched_tokens=1  rollout.max_num_seqs=128
rollout.max_num_batched_tokens=1  rollout.max_num_seqs=128  rollout.enable_chunked_prefill=false  GPU8
# engines of several processes
rollout.tensor_model_parallel_size=2  cluster.rollout_world_size=2
rollout.tensor_model_parallel_size=2  cluster.rollout_world_size=2  GPU8
rollout.tensor_model_parallel_size=2  vllm.distributed_executor_backend=mp  vllm.pipeline_parallel_size=1
rollout.tensor_model_parallel_size=2  vllm.distributed_executor_backend=mp  vllm.pipeline_parallel_size=1  GPU8
"""


@pytest.mark.parametrize(("run", "parts"), rows(RULES))
def test_what_is_refused(run, parts):
    says(refused(*run), *parts)


@pytest.mark.parametrize(("run", "_"), rows(LEGAL))
def test_legal_settings_pass(run, _):
    load(*run)


def test_ranks_that_split_sequences_count_as_one() -> None:
    """Six ranks in three groups take a mini-batch of nine sequences, and a pass has the tokens of two ranks."""
    config = load(
        "data.train_batch_size=3  actor.ppo_mini_batch_size=3  rollout.n=3  cluster.actor_world_size=6",
        f"actor.use_dynamic_bsz=true  actor.ppo_max_token_len_per_gpu=64  {SPLIT}=2",
        "recipe=ppo  cluster.critic_world_size=2",
    )
    place = placement(config)
    assert [place.row_groups(config, role) for role in ("actor", "ref", "critic", "reward_model")] == [3, 1, 1, 1]
    budgets = [limits.max_token_len for row in roles_of(config) for limits in row.passes(config)]
    assert budgets == [128] * 5, "of actor, reference and critic"
    by_default = placement(load(f"{SPLIT}=4"))
    assert (by_default.actor_world_size, by_default.world_sizes["ref"]) == (4, 4)


def test_gpus_that_take_turns_are_noted():
    (note,) = notes("GPU8  cluster.colocate=actor_ref")
    says(note, "cluster.colocate=actor_ref", "trainer.max_staleness=0", "all", "verl", "1")
    for at_once in ("trainer.max_staleness=1", "cluster.colocate=all"):
        assert not any("cluster.colocate=" in text for text in notes("GPU8", at_once))
