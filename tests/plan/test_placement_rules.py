"""Rules between batch sizes, lengths and processes: each is broken once, and the message names keys and values."""

import pytest

from grpo_dist.plan.commands import load_config
from grpo_dist.plan.placement import placement
from grpo_dist.plan.roles import roles_of
from tests.config.refusals import broken, refused
from tests.messages import says
from tests.plan.test_rules import ACTOR, GPU8, ROLLOUT

FSDP_SIZE = f"{ACTOR}.fsdp_config.fsdp_size"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"
PADDED = "actor_rollout_ref.model.use_remove_padding=false"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        broken("data.train_batch_size=48", f"{ACTOR}.ppo_mini_batch_size=32", also=["ppo_mini_batch_size=24"]),
        broken("data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=32", also=["ppo_mini_batch_size=16"]),
        broken(
            "cluster.actor_world_size=3", also=[f"{ACTOR}.ppo_mini_batch_size=32", f"{ROLLOUT}.n=8", "32 * 8", "256"]
        ),
        broken(f"{ROLLOUT}.tensor_model_parallel_size=2", "cluster.rollout_world_size=3", also=["processes"]),
        broken(f"{ROLLOUT}.tensor_model_parallel_size=2", "cluster.rollout_world_size=3", also=["GPUs"], beside=GPU8),
        broken(
            "trainer.n_gpus_per_node=6",
            f"{ROLLOUT}.tensor_model_parallel_size=4",
            also=["1 or 2 or 3 or 6"],
            beside=["cluster=multi_node", "trainer.nnodes=8"],
        ),
        broken(
            "cluster.actor_world_size=4",
            f"{ULYSSES}=3",
            also=["1 or 2 or 4"],
            beside=[f"{ACTOR}.use_kl_loss=false", "data.train_batch_size=48"],
        ),
        broken(
            "cluster.actor_world_size=6",
            f"{ULYSSES}=2",
            also=[f"{ACTOR}.ppo_mini_batch_size=32", "256", "3 actor groups"],
            beside=["cluster.ref_world_size=2", f"{ROLLOUT}.n=8"],
        ),
        broken(
            "cluster.ref_world_size=3",
            also=["actor_rollout_ref.ref.ulysses_sequence_parallel_size=2", "1 or 3"],
            beside=["cluster.actor_world_size=4", f"{ULYSSES}=2"],
        ),
        broken(f"{ULYSSES}=2", PADDED, also=["1"], beside=["actor_rollout_ref.ref.ulysses_sequence_parallel_size=1"]),
        broken(
            f"{ACTOR}.ppo_max_token_len_per_gpu=63",
            also=["128", "2 ranks", "64"],
            beside=[f"{ULYSSES}=2", f"{ACTOR}.use_dynamic_bsz=true"],
        ),
        broken(
            "cluster.actor_world_size=16",
            f"{FSDP_SIZE}=12",
            also=["divisor", "-1"],
            beside=["cluster=multi_node", "trainer.nnodes=3"],
        ),
        broken(
            "trainer.n_gpus_per_node=6",
            f"{FSDP_SIZE}=8",
            also=["4", "-1"],
            beside=["cluster=multi_node", "trainer.nnodes=4", "cluster.actor_world_size=16"],
        ),
        broken(
            "trainer.n_gpus_per_node=4",
            "cluster.actor_world_size=6",
            "cluster.rollout_world_size=2",
            f"{FSDP_SIZE}=3",
            f"{ROLLOUT}.tensor_model_parallel_size=2",
            also=["cluster.ref_world_size=null", "rollout", "cluster.*"],
            beside=[
                "cluster=multi_node",
                "trainer.nnodes=2",
                f"{ACTOR}.use_kl_loss=false",
                "data.train_batch_size=48",
                f"{ACTOR}.ppo_mini_batch_size=48",
            ],
        ),
        broken(
            f"{ROLLOUT}.checkpoint_engine.backend=broadcast",
            also=["trainer.n_gpus_per_node=1", "NCCL", "null, ipc or object_store"],
            beside=["cluster=single_gpu"],
        ),
        broken(
            f"{ROLLOUT}.checkpoint_engine.backend=ipc",
            also=["trainer.n_gpus_per_node=8", "null"],
            beside=["cluster=node8"],
        ),
        *(
            (
                [*cluster, f"{ROLLOUT}.checkpoint_engine.changes_only=true"],
                [
                    f"{ROLLOUT}.checkpoint_engine.changes_only=true",
                    f"{ROLLOUT}.checkpoint_engine.backend={backend}",
                    "object_store",
                ],
            )
            for cluster, backend in (
                (["cluster=node8"], "null"),
                ([f"{ROLLOUT}.checkpoint_engine.backend=ipc"], "ipc"),
            )
        ),
        broken(f"{ROLLOUT}.checkpoint_engine.changes_only=true", f"{ROLLOUT}.name=pkg.engine:Engine", also=["false"]),
        broken(
            f"{ROLLOUT}.checkpoint_engine.backend=ipc",
            "trainer.nnodes=2",
            also=["null"],
            beside=["ray_kwargs.ray_init.address=auto"],
        ),
        broken(
            f"{ROLLOUT}.free_cache_engine=true",
            "trainer.max_staleness=1",
            also=["false", "0"],
            beside=["cluster=single_gpu"],
        ),
        broken(
            f"{ROLLOUT}.max_num_batched_tokens=127",
            f"{ROLLOUT}.max_num_seqs=128",
            also=["raise", "lower"],
            beside=["cluster=node8"],
        ),
        broken(f"{ROLLOUT}.max_num_batched_tokens=127", f"{ROLLOUT}.max_num_seqs=129", also=["raise", "lower"]),
        *(
            (
                [*role, f"{model}.enable_activation_offload=true"],
                [f"{model}.enable_activation_offload=true", f"{model}.enable_gradient_checkpointing=false"],
            )
            for role, model in (([], "actor_rollout_ref.model"), (["recipe=ppo"], "critic.model"))
        ),
        broken(
            f"{ROLLOUT}.max_model_len=127",
            also=["data.max_prompt_length=64", "data.max_response_length=64", "prompt + response = 128"],
        ),
        broken(f"{ACTOR}.fsdp_config.fsdp_size=3", also=["cluster.actor_world_size=null", "2 actor", "divisor", "-1"]),
        broken(
            f"{ACTOR}.ppo_max_token_len_per_gpu=100",
            also=["data.max_prompt_length=64", "data.max_response_length=64", "prompt + response = 128"],
            beside=[f"{ACTOR}.use_dynamic_bsz=true"],
        ),
        broken(
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=127",
            also=["data.max_prompt_length=64", "data.max_response_length=64", "prompt + response = 128"],
            beside=["actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true"],
        ),
        broken(
            "trainer.n_gpus_per_node=2",
            "cluster.ref_world_size=1",
            also=[
                "cluster.colocate=null",
                f"{ROLLOUT}.tensor_model_parallel_size=1",
                "trainer.nnodes=1",
                "actor 1 + rollout 1 + ref 1 = 3",
                "cluster.actor_world_size",
                "cluster.rollout_world_size",
                "cluster.colocate=all",
            ],
            beside=["cluster=node8"],
        ),
        broken(
            "cluster.actor_world_size=2",
            also=[
                "cluster.rollout_world_size=1",
                "cluster.ref_world_size=1",
                "cluster.colocate=null",
                f"{ROLLOUT}.tensor_model_parallel_size=1",
                "trainer.nnodes=1",
                "trainer.n_gpus_per_node=1",
                "actor 2 = 2",
            ],
            beside=["cluster=single_gpu"],
        ),
        broken(
            "cluster.colocate=all",
            "cluster.actor_world_size=2",
            "cluster.rollout_world_size=4",
            also=[
                "cluster.ref_world_size=null",
                "actor 2, rollout 4, ref 2",
                "cluster.actor_world_size to 4",
                "others to 2",
            ],
            beside=GPU8,
        ),
        broken("cluster.colocate=actor_ref", "cluster.ref_world_size=2", also=["4", "null"], beside=GPU8),
        broken("cluster.rollout_world_size=2", "cluster.max_rollout_world_size=1", also=["null"]),
        broken(
            f"{ROLLOUT}.tensor_model_parallel_size=2",
            "cluster.max_rollout_world_size=5",
            beside=["cluster.num_cpus_per_worker=1"],
        ),
        broken("cluster.max_rollout_world_size=2", also=["null", "colocate=actor_ref"], beside=["cluster=single_gpu"]),
        broken("cluster.max_rollout_world_size=2", also=["cluster.num_cpus_per_worker=null"]),
        broken(
            f"{ROLLOUT}.checkpoint_engine.backend=ipc",
            "cluster.max_rollout_world_size=2",
            also=["null"],
            beside=["cluster.num_cpus_per_worker=1"],
        ),
        broken(
            "trainer.n_gpus_per_node=6",
            f"{FSDP_SIZE}=4",
            "cluster.actor_world_size=12",
            f"{ROLLOUT}.tensor_model_parallel_size=2",
            also=["cluster.rollout_world_size=null", "cluster.ref_world_size=null", "actor, rollout, ref", "cluster.*"],
            beside=[
                "cluster=multi_node",
                "trainer.nnodes=2",
                "data.train_batch_size=36",
                f"{ACTOR}.ppo_mini_batch_size=36",
                "cluster.colocate=all",
            ],
        ),
    ],
)
def test_each_rule(overrides, parts):
    says(refused(*overrides), *parts)


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


def test_ranks_that_split_sequences_count_as_one() -> None:
    """Six ranks in three groups take a mini-batch of nine sequences, and a pass has the tokens of two ranks."""
    sizes = [
        "data.train_batch_size=3",
        f"{ACTOR}.ppo_mini_batch_size=3",
        f"{ROLLOUT}.n=3",
        "cluster.actor_world_size=6",
    ]
    dynamic = [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=64"]
    config, _ = load_config([*sizes, *dynamic, f"{ULYSSES}=2", "recipe=ppo", "cluster.critic_world_size=2"])
    place = placement(config)
    assert [place.row_groups(config, role) for role in ("actor", "ref", "critic", "reward_model")] == [3, 1, 1, 1]
    budgets = [limits.max_token_len for row in roles_of(config) for limits in row.passes(config)]
    assert budgets == [128] * 5, "of actor, reference and critic"


def test_by_default_there_are_as_many_ranks_as_split_a_sequence() -> None:
    place = placement(load_config([f"{ULYSSES}=4"])[0])
    assert (place.actor_world_size, place.world_sizes["ref"]) == (4, 4)


def test_gpus_that_take_turns_are_noted():
    (note,) = load_config([*GPU8, "cluster.colocate=actor_ref"])[1]
    says(note, "cluster.colocate=actor_ref", "trainer.max_staleness=0", "all", "verl", "1")
    for at_once in ("trainer.max_staleness=1", "cluster.colocate=all"):
        assert not any("cluster.colocate=" in text for text in load_config([*GPU8, at_once])[1])
