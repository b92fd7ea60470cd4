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
            "one GPU, and roles share theirs; set it to null, ipc or object_store",
        ),
        (
            ["cluster=node8", f"{ROLLOUT}.checkpoint_engine.backend=ipc"],
            f"{ROLLOUT}.checkpoint_engine.backend=ipc, trainer.n_gpus_per_node=8: it needs an actor rank on each "
            "engine's GPU, and here they have GPUs of their own; set it to null",
        ),
        (
            [f"{ROLLOUT}.checkpoint_engine.backend=ipc", "trainer.nnodes=2", "ray_kwargs.ray_init.address=auto"],
            f"{ROLLOUT}.checkpoint_engine.backend=ipc, trainer.nnodes=2: it needs an actor rank on each engine's "
            "machine, which several machines do not promise; set it to null",
        ),
        (
            ["cluster=single_gpu", f"{ROLLOUT}.free_cache_engine=true", "trainer.max_staleness=1"],
            f"{ROLLOUT}.free_cache_engine=true, trainer.max_staleness=1: engines that sample ahead need their memory "
            "during the update; set the first to false, or the second to 0",
        ),
        (
            ["cluster=node8", f"{ROLLOUT}.max_num_batched_tokens=127", f"{ROLLOUT}.max_num_seqs=128"],
            f"{ROLLOUT}.max_num_batched_tokens=127, {ROLLOUT}.max_num_seqs=128: a pass must hold a token of every "
            "sequence that runs at once; raise the first or lower the second",
        ),
        (
            [f"{ROLLOUT}.max_num_batched_tokens=127", f"{ROLLOUT}.max_num_seqs=129"],
            f"{ROLLOUT}.max_num_batched_tokens=127, {ROLLOUT}.max_num_seqs=129: a pass must hold a token of every "
            "sequence that runs at once; raise the first or lower the second",
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
            ["cluster=node8", "trainer.n_gpus_per_node=2", "cluster.ref_world_size=1"],
            f"cluster.ref_world_size=1, cluster.colocate=null, {ROLLOUT}.tensor_model_parallel_size=1, "
            "trainer.nnodes=1, trainer.n_gpus_per_node=2: actor 1 + rollout 1 + ref 1 = 3 GPUs are needed and there "
            "are 2; set smaller cluster.actor_world_size, cluster.rollout_world_size, cluster.ref_world_size, or more "
            "machines, or cluster.colocate=all, where engines and reference share the actor's GPUs",
        ),
        (
            ["cluster=single_gpu", "cluster.actor_world_size=2"],
            "cluster.actor_world_size=2, cluster.rollout_world_size=1, cluster.ref_world_size=1, "
            f"cluster.colocate=null, {ROLLOUT}.tensor_model_parallel_size=1, trainer.nnodes=1, "
            "trainer.n_gpus_per_node=1: actor 2 = 2 GPUs are needed and there are 1; set smaller "
            "cluster.actor_world_size, cluster.rollout_world_size, cluster.ref_world_size, or more machines",
        ),
        (
            [*GPU8, "cluster.colocate=all", "cluster.actor_world_size=2", "cluster.rollout_world_size=4"],
            "cluster.actor_world_size=2, cluster.rollout_world_size=4, cluster.ref_world_size=null, "
            "cluster.colocate=all: each GPU that is shared has an actor rank, and these are actor 2, rollout 4, ref 2; "
            "set cluster.actor_world_size to 4, the others to 2, or all three to null",
        ),
        (
            [*GPU8, "cluster.colocate=actor_ref", "cluster.ref_world_size=2"],
            "cluster.ref_world_size=2, cluster.colocate=actor_ref: a rank of the reference lies beside each of the 4 "
            "of the actor; leave ref_world_size null",
        ),
        (
            ["cluster.colocate=all"],
            "cluster.colocate=all: there are no GPUs to share; leave it null",
        ),
        (
            [
                *("cluster=multi_node", "trainer.nnodes=2", "trainer.n_gpus_per_node=6", "data.train_batch_size=36"),
                *(f"{ACTOR}.ppo_mini_batch_size=36", f"{FSDP_SIZE}=4", "cluster.colocate=all"),
                *("cluster.actor_world_size=12", f"{ROLLOUT}.tensor_model_parallel_size=2"),
            ],
            f"{FSDP_SIZE}=4, {ROLLOUT}.tensor_model_parallel_size=2, cluster.actor_world_size=12, "
            "cluster.rollout_world_size=null, cluster.ref_world_size=null, trainer.n_gpus_per_node=6: copies of the "
            "weights on 4 and engines on 2 GPUs are not cut between machines, and so actor, rollout, ref has no room "
            "on 2 machines of 6 GPUs; set other sizes, or fewer processes in cluster.*",
        ),
    ],
)
def test_each_rule(overrides, message):
    assert refused(*overrides) == message


def test_where_prompts_are_not_cut_a_pass_holds_the_longest_sequence():
    """Of 128 tokens here: on CPU, and on GPUs without chunked prefill."""
    sizes = [f"{ROLLOUT}.max_num_batched_tokens=1", f"{ROLLOUT}.max_num_seqs=128"]
    load_config(sizes)
    load_config([*GPU8, *sizes, f"{ROLLOUT}.enable_chunked_prefill=false"])


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
