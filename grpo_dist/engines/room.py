"""What to do where a GPU has no room for a role, as messages say it: sentences without the full stop."""

from __future__ import annotations

ACTOR_ROOM = (
    "set actor_rollout_ref.actor.fsdp_config.optimizer_offload=true and param_offload=true, or take more GPUs "
    "(trainer.n_gpus_per_node, trainer.nnodes)"
)
REF_ROOM = (
    "set actor_rollout_ref.ref.fsdp_config.param_offload=true, or give the reference GPUs of its own, or more of them "
    "(cluster.ref_world_size)"
)
REWARD_MODEL_ROOM = (
    "set reward_model.model.fsdp_config.param_offload=true, or give the reward model GPUs of its own, or more of them "
    "(cluster.reward_model_world_size)"
)
CRITIC_ROOM = (
    "set critic.model.fsdp_config.optimizer_offload=true and param_offload=true, or give the critic GPUs of its own, "
    "or more of them (cluster.critic_world_size)"
)
SUPERVISED_ROOM = (
    "set engine.optimizer_offload=true and engine.param_offload=true, or take more GPUs (trainer.n_gpus_per_node, "
    "trainer.nnodes)"
)
