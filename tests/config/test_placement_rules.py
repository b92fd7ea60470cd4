"""Rules between batch sizes, lengths and processes: each is broken once, and the message names keys and values."""

import pytest

from grpo_dist.config.load import load_config
from tests.config.test_rules import ACTOR, GPU8, ROLLOUT, refused

FSDP_SIZE = f"{ACTOR}.fsdp_config.fsdp_size"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.train_batch_size=48"],
            f"data.train_batch_size=48, {ACTOR}.ppo_mini_batch_size=32: the batch must be a multiple of the "
            "mini-batch; for example ppo_mini_batch_size=24",
        ),
        (
            ["data.train_batch_size=16"],
            f"data.train_batch_size=16, {ACTOR}.ppo_mini_batch_size=32: the batch must be a multiple of the "
            "mini-batch; for example ppo_mini_batch_size=16",
        ),
        (
            ["cluster.actor_world_size=3"],
            f"{ACTOR}.ppo_mini_batch_size=32, {ROLLOUT}.n=8, cluster.actor_world_size=3: 32 * 8 "
            "= 256 sequences of a "
            "mini-batch do not split over 3 actor ranks",
        ),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=2", "cluster.rollout_world_size=3"],
            f"cluster.rollout_world_size=3, {ROLLOUT}.tensor_model_parallel_size=2: rollout processes must be a "
            "multiple of the processes of one engine",
        ),
        (
            [*GPU8, f"{ROLLOUT}.tensor_model_parallel_size=2", "cluster.rollout_world_size=3"],
            f"cluster.rollout_world_size=3, {ROLLOUT}.tensor_model_parallel_size=2: rollout GPUs "
            "must be a multiple "
            "of the GPUs of one engine",
        ),
        (
            [
                "cluster=multi_node",
                "trainer.n_gpus_per_node=6",
                "trainer.nnodes=8",
                f"{ROLLOUT}.tensor_model_parallel_size=4",
            ],
            f"{ROLLOUT}.tensor_model_parallel_size=4, trainer.n_gpus_per_node=6: an engine lies "
            "in one machine, whose 6 GPUs must be whole engines; set it to 1 or 2 or 3 or 6",
        ),
        (
            ["cluster=multi_node", "trainer.nnodes=3", "cluster.actor_world_size=16", f"{FSDP_SIZE}=12"],
            f"{FSDP_SIZE}=12, cluster.actor_world_size=16: 16 actor ranks do not split into copies of 12; set a "
            "divisor, or -1",
        ),
        (
            [
                *("cluster=multi_node", "trainer.n_gpus_per_node=6", "trainer.nnodes=4", f"{FSDP_SIZE}=8"),
                "cluster.actor_world_size=16",
            ],
            f"{FSDP_SIZE}=8, trainer.n_gpus_per_node=6: a copy of the weights on 8 GPUs would share a machine of 6 "
            "with another copy, and its traffic would cross the network; set it to 4, a multiple of n_gpus_per_node, "
            "or -1",
        ),
        (
            [
                *("cluster=multi_node", "trainer.nnodes=2", "trainer.n_gpus_per_node=4", f"{ACTOR}.use_kl_loss=false"),
                *("cluster.actor_world_size=6", "cluster.rollout_world_size=2", f"{FSDP_SIZE}=3"),
                *(f"{ROLLOUT}.tensor_model_parallel_size=2", "data.train_batch_size=48"),
                f"{ACTOR}.ppo_mini_batch_size=48",
            ],
            f"{FSDP_SIZE}=3, {ROLLOUT}.tensor_model_parallel_size=2, cluster.actor_world_size=6, "
            "cluster.rollout_world_size=2, cluster.ref_world_size=null, trainer.n_gpus_per_node=4: copies of the "
            "weights on 3 and engines on 2 GPUs are not cut between machines, and so rollout has no room on 2 machines "
            "of 4 GPUs; set other sizes, or fewer processes in cluster.*",
        ),
        (
            ["cluster=single_gpu", f"{ROLLOUT}.checkpoint_engine.backend=broadcast"],
            f"{ROLLOUT}.checkpoint_engine.backend=broadcast, trainer.n_gpus_per_node=1: NCCL refuses two processes on "
            "one GPU, and all roles share the only one; set it to null or object_store",
        ),
        (
            [f"{ROLLOUT}.max_model_len=127"],
            f"{ROLLOUT}.max_model_len=127, data.max_prompt_length=64, "
            "data.max_response_length=64: must be at least "
            "prompt + response = 128, or null",
        ),
        (
            [f"{ACTOR}.fsdp_config.fsdp_size=3"],
            f"{ACTOR}.fsdp_config.fsdp_size=3, cluster.actor_world_size=null: 2 actor ranks do not split into copies "
            "of 3; set a divisor, or -1",
        ),
        (
            [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=100"],
            f"{ACTOR}.ppo_max_token_len_per_gpu=100, data.max_prompt_length=64, data.max_response_length=64: "
            "a pass must hold the longest sequence: at least prompt + response = 128",
        ),
        (
            [
                "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
                "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=127",
            ],
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=127, data.max_prompt_length=64, "
            "data.max_response_length=64: a pass must hold the longest sequence: at least prompt + response = 128",
        ),
        (
            ["cluster=node8", "trainer.n_gpus_per_node=2"],
            f"{ROLLOUT}.tensor_model_parallel_size=1, trainer.nnodes=1, "
            "trainer.n_gpus_per_node=2: actor 1 + rollout "
            "1 + ref 1 = 3 GPUs are needed and there are 2; set smaller cluster.actor_world_size, "
            "cluster.rollout_world_size or cluster.ref_world_size, or more machines, or "
            f"{ACTOR}.use_kl_loss=false (no reference)",
        ),
        (
            ["cluster=single_gpu", "cluster.actor_world_size=2"],
            f"cluster.actor_world_size=2, cluster.rollout_world_size=1, cluster.ref_world_size=1, "
            f"{ROLLOUT}.tensor_model_parallel_size=1, trainer.nnodes=1, "
            "trainer.n_gpus_per_node=1: one process of "
            "each role shares the only GPU, and this is actor 2 + rollout 1 + ref 1; leave cluster.* null",
        ),
    ],
)
def test_each_rule(overrides, message):
    assert refused(*overrides) == message


@pytest.mark.parametrize("where", [[], GPU8], ids=["cpu", "gpu"])
def test_engines_of_several_processes_are_taken(where):
    sizes = [f"{ROLLOUT}.tensor_model_parallel_size=2", "cluster.rollout_world_size=2"]
    load_config([*where, *sizes])
    load_config([*where, *sizes, f"{VLLM}.distributed_executor_backend=mp", f"{VLLM}.pipeline_parallel_size=1"])


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("tensor_parallel_size=2", f"{ROLLOUT}.tensor_model_parallel_size"),
        ("pipeline_parallel_size=2", f"raise {ROLLOUT}.tensor_model_parallel_size"),
        ("prefill_context_parallel_size=2", f"raise {ROLLOUT}.tensor_model_parallel_size"),
        ("data_parallel_size=2", "raise that"),
        ("enable_expert_parallel=true", "experts are split by their width"),
        ("enable_eplb=true", "leave it out"),
        ("nnodes=2", f"raise {ROLLOUT}.tensor_model_parallel_size"),
        ("distributed_executor_backend=ray", "leave it out"),
        ("distributed_executor_backend=uni", "leave it out"),
    ],
)
def test_vllms_own_arguments_do_not_lay_engines_out(argument, remedy):
    text = refused(f"{VLLM}.{argument}")
    assert text.startswith(f"{VLLM}.{argument}: ")
    assert remedy in text
