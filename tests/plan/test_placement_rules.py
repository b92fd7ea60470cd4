"""Rules between batch sizes, lengths and processes: each is broken once, and the message names keys and values."""

import pytest

from grpo_dist.plan.commands import load_config
from grpo_dist.plan.placement import placement
from grpo_dist.plan.roles import roles_of
from tests.messages import says
from tests.plan.test_rules import ACTOR, GPU8, ROLLOUT, refused

FSDP_SIZE = f"{ACTOR}.fsdp_config.fsdp_size"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"
PADDED = "actor_rollout_ref.model.use_remove_padding=false"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["data.train_batch_size=48", f"{ACTOR}.ppo_mini_batch_size=32"],
            ["data.train_batch_size=48", f"{ACTOR}.ppo_mini_batch_size=32", "ppo_mini_batch_size=24"],
        ),
        (
            ["data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=32"],
            ["data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=32", "ppo_mini_batch_size=16"],
        ),
        (
            ["cluster.actor_world_size=3"],
            [f"{ACTOR}.ppo_mini_batch_size=32", f"{ROLLOUT}.n=8", "cluster.actor_world_size=3", "32 * 8", "256"],
        ),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=2", "cluster.rollout_world_size=3"],
            ["cluster.rollout_world_size=3", f"{ROLLOUT}.tensor_model_parallel_size=2", "processes"],
        ),
        (
            [*GPU8, f"{ROLLOUT}.tensor_model_parallel_size=2", "cluster.rollout_world_size=3"],
            ["cluster.rollout_world_size=3", f"{ROLLOUT}.tensor_model_parallel_size=2", "GPUs"],
        ),
        (
            [
                "cluster=multi_node",
                "trainer.n_gpus_per_node=6",
                "trainer.nnodes=8",
                f"{ROLLOUT}.tensor_model_parallel_size=4",
            ],
            [f"{ROLLOUT}.tensor_model_parallel_size=4", "trainer.n_gpus_per_node=6", "1 or 2 or 3 or 6"],
        ),
        (
            ["cluster.actor_world_size=4", f"{ULYSSES}=3", f"{ACTOR}.use_kl_loss=false", "data.train_batch_size=48"],
            [f"{ULYSSES}=3", "cluster.actor_world_size=4", "1 or 2 or 4"],
        ),
        (
            ["cluster.actor_world_size=6", "cluster.ref_world_size=2", f"{ULYSSES}=2", f"{ROLLOUT}.n=8"],
            [f"{ULYSSES}=2", f"{ACTOR}.ppo_mini_batch_size=32", "cluster.actor_world_size=6", "256", "3 actor groups"],
        ),
        (
            ["cluster.actor_world_size=4", "cluster.ref_world_size=3", f"{ULYSSES}=2"],
            ["actor_rollout_ref.ref.ulysses_sequence_parallel_size=2", "cluster.ref_world_size=3", "1 or 3"],
        ),
        (
            [f"{ULYSSES}=2", "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1", PADDED],
            [f"{ULYSSES}=2", PADDED, "1"],
        ),
        (
            [f"{ULYSSES}=2", f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=63"],
            [f"{ACTOR}.ppo_max_token_len_per_gpu=63", "128", "2 ranks", "64"],
        ),
        (
            ["cluster=multi_node", "trainer.nnodes=3", "cluster.actor_world_size=16", f"{FSDP_SIZE}=12"],
            [f"{FSDP_SIZE}=12", "cluster.actor_world_size=16", "divisor", "-1"],
        ),
        (
            [
                *("cluster=multi_node", "trainer.n_gpus_per_node=6", "trainer.nnodes=4", f"{FSDP_SIZE}=8"),
                "cluster.actor_world_size=16",
            ],
            [f"{FSDP_SIZE}=8", "trainer.n_gpus_per_node=6", "4", "-1"],
        ),
        (
            [
                *("cluster=multi_node", "trainer.nnodes=2", "trainer.n_gpus_per_node=4", f"{ACTOR}.use_kl_loss=false"),
                *("cluster.actor_world_size=6", "cluster.rollout_world_size=2", f"{FSDP_SIZE}=3"),
                *(f"{ROLLOUT}.tensor_model_parallel_size=2", "data.train_batch_size=48"),
                f"{ACTOR}.ppo_mini_batch_size=48",
            ],
            [
                f"{FSDP_SIZE}=3",
                f"{ROLLOUT}.tensor_model_parallel_size=2",
                "cluster.actor_world_size=6",
                "cluster.rollout_world_size=2",
                "cluster.ref_world_size=null",
                "trainer.n_gpus_per_node=4",
                "rollout",
                "cluster.*",
            ],
        ),
        (
            ["cluster=single_gpu", f"{ROLLOUT}.checkpoint_engine.backend=broadcast"],
            [
                f"{ROLLOUT}.checkpoint_engine.backend=broadcast",
                "trainer.n_gpus_per_node=1",
                "NCCL",
                "null, ipc or object_store",
            ],
        ),
        (
            ["cluster=node8", f"{ROLLOUT}.checkpoint_engine.backend=ipc"],
            [f"{ROLLOUT}.checkpoint_engine.backend=ipc", "trainer.n_gpus_per_node=8", "null"],
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
        (
            [f"{ROLLOUT}.checkpoint_engine.changes_only=true", f"{ROLLOUT}.name=pkg.engine:Engine"],
            [f"{ROLLOUT}.checkpoint_engine.changes_only=true", f"{ROLLOUT}.name=pkg.engine:Engine", "false"],
        ),
        (
            [f"{ROLLOUT}.checkpoint_engine.backend=ipc", "trainer.nnodes=2", "ray_kwargs.ray_init.address=auto"],
            [f"{ROLLOUT}.checkpoint_engine.backend=ipc", "trainer.nnodes=2", "null"],
        ),
        (
            ["cluster=single_gpu", f"{ROLLOUT}.free_cache_engine=true", "trainer.max_staleness=1"],
            [f"{ROLLOUT}.free_cache_engine=true", "trainer.max_staleness=1", "false", "0"],
        ),
        (
            ["cluster=node8", f"{ROLLOUT}.max_num_batched_tokens=127", f"{ROLLOUT}.max_num_seqs=128"],
            [f"{ROLLOUT}.max_num_batched_tokens=127", f"{ROLLOUT}.max_num_seqs=128", "raise", "lower"],
        ),
        (
            [f"{ROLLOUT}.max_num_batched_tokens=127", f"{ROLLOUT}.max_num_seqs=129"],
            [f"{ROLLOUT}.max_num_batched_tokens=127", f"{ROLLOUT}.max_num_seqs=129", "raise", "lower"],
        ),
        *(
            (
                [*role, f"{model}.enable_activation_offload=true"],
                [f"{model}.enable_activation_offload=true", f"{model}.enable_gradient_checkpointing=false"],
            )
            for role, model in (([], "actor_rollout_ref.model"), (["recipe=ppo"], "critic.model"))
        ),
        (
            [f"{ROLLOUT}.max_model_len=127"],
            [
                f"{ROLLOUT}.max_model_len=127",
                "data.max_prompt_length=64",
                "data.max_response_length=64",
                "prompt + response = 128",
            ],
        ),
        (
            [f"{ACTOR}.fsdp_config.fsdp_size=3"],
            [f"{ACTOR}.fsdp_config.fsdp_size=3", "cluster.actor_world_size=null", "2 actor", "divisor", "-1"],
        ),
        (
            [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=100"],
            [
                f"{ACTOR}.ppo_max_token_len_per_gpu=100",
                "data.max_prompt_length=64",
                "data.max_response_length=64",
                "prompt + response = 128",
            ],
        ),
        (
            [
                "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
                "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=127",
            ],
            [
                "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=127",
                "data.max_prompt_length=64",
                "data.max_response_length=64",
                "prompt + response = 128",
            ],
        ),
        (
            ["cluster=node8", "trainer.n_gpus_per_node=2", "cluster.ref_world_size=1"],
            [
                "cluster.ref_world_size=1",
                "cluster.colocate=null",
                f"{ROLLOUT}.tensor_model_parallel_size=1",
                "trainer.nnodes=1",
                "trainer.n_gpus_per_node=2",
                "actor 1 + rollout 1 + ref 1 = 3",
                "cluster.actor_world_size",
                "cluster.rollout_world_size",
                "cluster.colocate=all",
            ],
        ),
        (
            ["cluster=single_gpu", "cluster.actor_world_size=2"],
            [
                "cluster.actor_world_size=2",
                "cluster.rollout_world_size=1",
                "cluster.ref_world_size=1",
                "cluster.colocate=null",
                f"{ROLLOUT}.tensor_model_parallel_size=1",
                "trainer.nnodes=1",
                "trainer.n_gpus_per_node=1",
                "actor 2 = 2",
            ],
        ),
        (
            [*GPU8, "cluster.colocate=all", "cluster.actor_world_size=2", "cluster.rollout_world_size=4"],
            [
                "cluster.actor_world_size=2",
                "cluster.rollout_world_size=4",
                "cluster.ref_world_size=null",
                "cluster.colocate=all",
                "actor 2, rollout 4, ref 2",
                "cluster.actor_world_size to 4",
                "others to 2",
            ],
        ),
        (
            [*GPU8, "cluster.colocate=actor_ref", "cluster.ref_world_size=2"],
            ["cluster.ref_world_size=2", "cluster.colocate=actor_ref", "4", "null"],
        ),
        (
            ["cluster.rollout_world_size=2", "cluster.max_rollout_world_size=1"],
            ["cluster.max_rollout_world_size=1", "cluster.rollout_world_size=2", "null"],
        ),
        (
            [
                f"{ROLLOUT}.tensor_model_parallel_size=2",
                "cluster.max_rollout_world_size=5",
                "cluster.num_cpus_per_worker=1",
            ],
            ["cluster.max_rollout_world_size=5", f"{ROLLOUT}.tensor_model_parallel_size=2"],
        ),
        (
            ["cluster=single_gpu", "cluster.max_rollout_world_size=2"],
            ["cluster.max_rollout_world_size=2", "null", "colocate=actor_ref"],
        ),
        (
            ["cluster.max_rollout_world_size=2"],
            ["cluster.max_rollout_world_size=2", "cluster.num_cpus_per_worker=null"],
        ),
        (
            [
                f"{ROLLOUT}.checkpoint_engine.backend=ipc",
                "cluster.max_rollout_world_size=2",
                "cluster.num_cpus_per_worker=1",
            ],
            ["cluster.max_rollout_world_size=2", f"{ROLLOUT}.checkpoint_engine.backend=ipc", "null"],
        ),
        (
            [
                *("cluster=multi_node", "trainer.nnodes=2", "trainer.n_gpus_per_node=6", "data.train_batch_size=36"),
                *(f"{ACTOR}.ppo_mini_batch_size=36", f"{FSDP_SIZE}=4", "cluster.colocate=all"),
                *("cluster.actor_world_size=12", f"{ROLLOUT}.tensor_model_parallel_size=2"),
            ],
            [
                f"{FSDP_SIZE}=4",
                f"{ROLLOUT}.tensor_model_parallel_size=2",
                "cluster.actor_world_size=12",
                "cluster.rollout_world_size=null",
                "cluster.ref_world_size=null",
                "trainer.n_gpus_per_node=6",
                "actor, rollout, ref",
                "cluster.*",
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
