"""The estimate of a step, worked out by hand for a model of one layer, and who waits."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_dist.config.load import load_config
from grpo_dist.config.processor import physical_cores
from grpo_dist.config.step_estimate import GPU_GIB, NETWORK, OPTIMIZER_BYTES, PASSES, StepEstimate, step_estimate
from grpo_dist.config.step_rates import DecodeRates, MachineRates, PassRates, Rates
from grpo_dist.sizes import GIB, KV_BLOCK_TOKENS
from grpo_dist.trainer.rollout import pump

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
# 4 heads of 256; layer: 4 * 1024^2 + 3 * 1024 * 4096 + 2 * 1024 numbers; embedding and head: 32,000 * 1024 each.
MODEL = {"hidden_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 4096,
         "vocab_size": 32000, "tie_word_embeddings": False}  # fmt: skip
LAYER, HEAD = 4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024, 32000 * 1024
PARAMETERS = LAYER + 2 * HEAD + 1024
BYTES = 2.0 * PARAMETERS
# 64 prompts of 100 (of at most 200) tokens with 8 responses of 300.
RUN = ("cluster=node8", "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=32", f"{ROLLOUT}.n=8",
       "data.max_prompt_length=200", "data.max_response_length=300",
       "actor_rollout_ref.model.override_config.max_position_embeddings=1024",
       f"{ROLLOUT}.kv_cache_memory_gib=null")  # fmt: skip
FLOPS, BANDWIDTH, SYNC, NVLINK, STEP_S = 4e14, 2e12, 4e10, 3e11, 0.005
PASS = PassRates({1024: FLOPS}, FLOPS)
GPU = MachineRates(
    "a GPU", {"1 bf16": Rates(BANDWIDTH, PASS, PASS, DecodeRates(STEP_S), {"broadcast": SYNC}, exchange=NVLINK)}
)
RESPONSES, TOKENS = 512 * 300, 64 * 100 + 512 * 300
MATRICES = LAYER - 2 * 1024
PAIRS = 64 * 100**2 / 2 + RESPONSES * (100 + 150)
# every token meets the layer, those of responses the output layer; attention multiplies each pair twice
FORWARD = 2.0 * (MATRICES * TOKENS + HEAD * RESPONSES) + 4.0 * 1024 * PAIRS
ADAM = 2 * OPTIMIZER_BYTES * PARAMETERS / 4 / BANDWIDTH  # two optimizer steps of a quarter of the numbers
BIG = (f"{ACTOR}.ppo_micro_batch_size_per_gpu=64", f"{REF}.log_prob_micro_batch_size_per_gpu=128")
KV = 2 * 1024 * 2.0  # bytes of a token's keys and values


def estimate(*overrides: str, model: dict[str, Any] | None = None, machine: MachineRates = GPU) -> StepEstimate:
    config, _ = load_config([*RUN, *overrides])
    found = step_estimate(config, MODEL | (model or {}), machine)
    assert found is not None
    return found


def decoding(running: float) -> float:
    """Seconds of a step: weights, or products, and the keys and values of 250 tokens."""
    computing = running * 2 * (MATRICES + HEAD) / FLOPS
    return max(BYTES / BANDWIDTH, computing) + running * KV * 250 / BANDWIDTH + STEP_S


# The last 4 tokens of a prompt, on average half a block, are computed for each response: 96 are shared.
PREFILL = (
    (64 * (100 - KV_BLOCK_TOKENS["cuda"] / 2) + 512 * KV_BLOCK_TOKENS["cuda"] / 2)
    / 4
    * (2.0 * MATRICES + 2.0 * 1024 * 100)
    / FLOPS
)


def test_every_phase_by_hand() -> None:
    """4 actor ranks with the reference beside them, 4 engines; computing takes longer than exchanging weights."""
    phases = estimate(*BIG).phases
    assert phases["update"] == pytest.approx(3 * FORWARD / 4 / FLOPS + ADAM)
    assert phases["reference"] == phases["old log-probs"] == pytest.approx(FORWARD / 4 / FLOPS)
    assert phases["weight sync"] == BYTES / SYNC
    assert phases["generation"] == pytest.approx(PREFILL + 300 * decoding(128))


def test_shorter_responses_are_expected() -> None:
    """The longest still has 300 tokens: it is alone at the end."""
    short = estimate("trainer.expected_response_length=100")
    assert short.phases["generation"] < estimate().phases["generation"]
    assert short.phases["update"] < 0.5 * estimate().phases["update"]
    assert short.phases["generation"] > 300 * STEP_S
    assert short.phases["weight sync"] == estimate().phases["weight sync"]


def test_rates_of_a_processor_by_hand() -> None:
    """Calls of passes and layers, sequences and samples count; ranks exchange weights besides computing."""
    rates = PassRates({64: 1e9, 1024: 1e10}, 1e9, pass_s=0.01, layer_s=0.002, sequence_s=0.0001)
    decode = DecodeRates(0.003, 0.001, 0.0002, 1e-8, products=2.0, cache=0.5)
    known = Rates(1e10, rates, rates, decode, {"object_store": 1e9}, 0.04, exchange=1e8, exchange_s=0.005)
    machine = MachineRates("a processor", {"1 fp32": known})
    small = ("cluster=cpu", "cluster.actor_world_size=2", f"{ROLLOUT}.max_num_seqs=512",
             "actor_rollout_ref.model.enable_gradient_checkpointing=false", f"{ROLLOUT}.dtype=float32",
             f"{ROLLOUT}.kv_cache_memory_gib=8", *BIG)  # fmt: skip
    found = estimate(*small, machine=machine)
    products, attention = 2.0 * (MATRICES * TOKENS + HEAD * RESPONSES), 4.0 * 1024 * PAIRS
    size = 4.0 * PARAMETERS
    assert found.phases["reference"] == pytest.approx(4 * 0.012 + 512 * 0.0001 + products / 1e10 + attention / 1e9)
    computed = 4 * 0.012 + 256 * 0.0001 + 3 * (products / 1e10 + attention / 1e9) / 2
    exchanged = 4 * (3 * size / 2 / 1e8 + 3 * 2 * 0.005)
    adam = 2 * OPTIMIZER_BYTES * PARAMETERS / 2 / 1e10
    assert found.phases["update"] == pytest.approx(computed + exchanged + adam)
    assert found.phases["weight sync"] == pytest.approx(0.04 + size / 1e9)
    running = 512
    kernels = 2.0 * running * 2 * (MATRICES + HEAD) / 1e10 + 0.5 * running * 2 * KV * 250 / 1e10
    step = kernels + 0.003 + 0.001 + running * (0.0002 + 32000 * 1e-8)
    again = KV_BLOCK_TOKENS["cpu"] / 2
    prefill = 64 * (100 - again) + 512 * again
    first = 0.012 + 2 * MATRICES * prefill / 1e10 + 2 * 1024 * 100 * prefill / 1e9
    assert found.phases["generation"] == pytest.approx(first + 300 * step)


def test_processes_that_share_cores_take_turns() -> None:
    rates = PassRates({1024: 1e10}, 1e10)
    machine = MachineRates("", {"1 fp32": Rates(1e10, rates, rates, DecodeRates(0.01), {"object_store": 1e9})})
    cores = physical_cores()
    # the cache holds an eighth of the sequences
    few = ("cluster=cpu", f"{ROLLOUT}.max_num_seqs=64", f"{ROLLOUT}.kv_cache_memory_gib=8")
    crowded = estimate(*few, f"cluster.num_threads_per_worker={cores}", machine=machine)
    followers = crowded.phases["reference"] + crowded.phases["old log-probs"]
    assert crowded.beyond == pytest.approx(followers)
    assert crowded.total == pytest.approx(sum(crowded.phases.values()))
    ahead = estimate(*few, f"cluster.num_threads_per_worker={cores}", "trainer.max_staleness=1", machine=machine)
    assert ahead.total == pytest.approx(sum(ahead.phases.values())), "the cores are no more"


def test_log_probs_follow_generation_in_passes() -> None:
    """Two waves: the first two of four passes begin when half of the responses are there."""
    assert PASSES == pump.PASSES
    one = estimate(*BIG)
    log_probs = one.phases["reference"] + one.phases["old log-probs"]
    assert one.beyond == pytest.approx(log_probs), "all are generated at the same time"
    two = estimate(*BIG, f"{ROLLOUT}.max_num_seqs=64")
    assert two.beyond == pytest.approx(max(0.5 * log_probs, log_probs - two.phases["generation"] / 2))


def test_recomputed_layers_lora_and_epochs() -> None:
    size = f"{ACTOR}.ppo_micro_batch_size_per_gpu=64"
    update = estimate(size).phases["update"]
    checkpointing = estimate(size, "actor_rollout_ref.model.enable_gradient_checkpointing=true").phases["update"]
    assert checkpointing - ADAM == pytest.approx((update - ADAM) * 4 / 3)
    lora = estimate(size, "actor_rollout_ref.model.lora_rank=8")
    factors = 8 * (4 * 2 * 1024 + 3 * (1024 + 4096))
    adam = 2 * OPTIMIZER_BYTES * factors / 4 / BANDWIDTH
    assert lora.phases["update"] - adam == pytest.approx(2 * FORWARD / 4 / FLOPS)
    assert lora.phases["reference"] == pytest.approx(FORWARD / 4 / FLOPS), "by the actor, without its factors"
    assert estimate(size, f"{ACTOR}.ppo_epochs=2").phases["update"] == pytest.approx(2 * update)


def test_a_token_meets_the_experts_that_it_goes_to() -> None:
    """2 of 16 experts, and the router; all 16 are sent to the engines."""
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "model_type": "qwen3_moe"}
    big = f"{ACTOR}.ppo_micro_batch_size_per_gpu=64"
    found = estimate(big, model=experts).phases
    layer = 4 * 1024**2 + 2 * 3 * 1024 * 512 + 16 * 1024
    forward = 2.0 * (layer * TOKENS + HEAD * RESPONSES) + 4.0 * 1024 * PAIRS
    assert found["reference"] == pytest.approx(forward / 4 / FLOPS)
    numbers = 4 * 1024**2 + 16 * 3 * 1024 * 512 + 16 * 1024 + 2 * 1024 + 2 * HEAD + 1024
    assert found["weight sync"] == pytest.approx(2 * numbers / SYNC)


def test_small_passes_wait_for_weights() -> None:
    """2 mini-batches of 64 sequences a rank, one at a time: gathered twice, gradients reduced in float32."""
    small = f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"
    exchanged = 128 * 4 * BYTES * 3 / 4 / NVLINK
    assert estimate(small).phases["update"] == pytest.approx(exchanged + ADAM)
    budget = (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=16384")
    assert estimate(small, *budget).phases["update"] == pytest.approx(3 * FORWARD / 4 / FLOPS + ADAM)
    far = ("cluster=multi_node", "trainer.nnodes=2", "cluster.actor_world_size=16", "cluster.colocate=all")
    assert estimate(small, *far).phases["update"] == pytest.approx(32 * 4 * BYTES * 15 / 16 / NETWORK + ADAM / 4)


def test_ranks_that_split_sequences_exchange_what_attention_takes() -> None:
    """Queries, keys, values and what comes back, 1,024 numbers a token each: half of them go to the other rank."""
    plain, split = (estimate(*BIG, *more).phases for more in ((), (f"{ACTOR}.ulysses_sequence_parallel_size=2",)))
    exchanged = 4 * 1024 * 2 * TOKENS / 4 / 2 / NVLINK
    assert split["reference"] - plain["reference"] == pytest.approx(exchanged)
    assert split["update"] - plain["update"] == pytest.approx(2 * exchanged)
    assert split["generation"] == plain["generation"]


def test_the_cache_limits_how_many_sequences_run() -> None:
    """A cache for 16 sequences of 400 tokens: 128 sequences take eight times as many steps."""
    phases = estimate(f"{ROLLOUT}.kv_cache_memory_gib={16 * 400 * KV / GIB}").phases
    assert phases["generation"] == pytest.approx(PREFILL + 8 * 300 * decoding(16))
    share = (BYTES + 16 * 400 * KV) / GIB / GPU_GIB
    of_the_gpu = estimate(f"{ROLLOUT}.gpu_memory_utilization={share}").phases
    assert of_the_gpu["generation"] == pytest.approx(phases["generation"])


def test_what_runs_side_by_side() -> None:
    found = estimate()
    phases = found.phases
    log_probs = phases["reference"] + phases["old log-probs"]
    rest = phases["update"] + phases["weight sync"]
    assert found.total == pytest.approx(phases["generation"] + found.beyond + rest)
    assert found.waiting["rollout"] == pytest.approx(1 - phases["generation"] / found.total)
    assert found.waiting["actor"] == pytest.approx(1 - (log_probs + phases["update"]) / found.total)
    ahead = estimate("trainer.max_staleness=1")
    trains = ahead.phases["update"] + ahead.phases["reference"] + ahead.phases["old log-probs"]
    longest = max(ahead.phases["generation"], trains)
    assert ahead.total == pytest.approx(longest + ahead.phases["weight sync"])
    own = estimate("cluster.ref_world_size=1")
    assert own.phases["reference"] == pytest.approx(4 * phases["reference"], rel=0.3)
    assert own.waiting["ref"] == pytest.approx(1 - own.phases["reference"] / own.total)
    scorer = ("reward_model.enable=true", "reward_model.model.path=Skywork/Skywork-Reward-Llama-3.1-8B")
    scored = estimate(*scorer)
    beside = scored.phases["reward model"] + log_probs
    assert scored.waiting["actor"] == pytest.approx(1 - (beside + scored.phases["update"]) / scored.total)
    apart = estimate(*scorer, "cluster.reward_model_world_size=1", "cluster.ref_world_size=1")
    assert apart.waiting["reward_model"] == pytest.approx(1 - apart.phases["reward model"] / apart.total)
    taught = estimate("actor_rollout_ref.ref.model.path=Qwen/Qwen3-8B")
    assert taught.phases["reference"] > 5 * phases["reference"]
    assert taught.phases["old log-probs"] == phases["old log-probs"]
    values = ("recipe=ppo", "critic.model.path=Qwen/Qwen3-8B")
    criticised = estimate(*values)
    assert criticised.phases["critic update"] > criticised.phases["values"] > 0
    updates = criticised.phases["update"] + criticised.phases["critic update"]
    passes = sum(criticised.phases[name] for name in ("reference", "old log-probs", "values"))
    assert criticised.waiting["actor"] == pytest.approx(1 - (passes + updates) / criticised.total)
    its_own = estimate(*values, "cluster.critic_world_size=1", "cluster.ref_world_size=1")
    busy = its_own.phases["values"] + its_own.phases["critic update"]
    assert its_own.waiting["critic"] == pytest.approx(1 - busy / its_own.total)
    together = estimate("cluster.colocate=all", f"{ROLLOUT}.gpu_memory_utilization=0.4")
    assert together.total == pytest.approx(sum(together.phases.values()))
    assert together.waiting == {}


@pytest.mark.parametrize("change", ["data.train_batch_size=128", f"{ROLLOUT}.n=16", "data.max_response_length=600"])
def test_more_work_takes_longer_and_faster_memory_shorter(change: str) -> None:
    usual, more = estimate(*BIG), estimate(*BIG, change)
    for phase in ("generation", "reference", "update"):
        assert more.phases[phase] > usual.phases[phase]
    fast = Rates(2 * BANDWIDTH, PASS, PASS, DecodeRates(STEP_S), {"broadcast": SYNC})
    faster = estimate(*BIG, machine=MachineRates("", {"1 bf16": fast}))
    assert faster.total < usual.total


def test_nothing_is_said_of_an_unknown_machine_or_model() -> None:
    config, _ = load_config([*RUN])
    assert step_estimate(config, MODEL, None) is None
    assert step_estimate(config, {"n_embd": 8}, GPU) is None
    assert step_estimate(config, None, GPU) is None
    assert "reference" not in estimate(f"{ACTOR}.use_kl_loss=false").phases
