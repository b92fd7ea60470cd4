"""Router replay (R3, arXiv 2510.11370): the trainer sends a token to the experts that the sampler has sent it to.

A router computes its logits as ever. Which experts are chosen is what the engine has recorded; what each one weighs
comes from these logits, by the model's own rule, so gradients reach the router:

    weight of expert i = exp(s_i) / sum of exp(s_j) over the recorded experts j

or, for models that do not normalise the chosen weights, over all experts. A token whose experts are not known goes
where the router sends it. The paper replays the responses' tokens; here the prompt's are replayed too.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn

from grpo_dist.errors import ConfigError
from grpo_dist.protocol.sequences import are_unknown

KEY = "actor_rollout_ref.actor.router_replay.mode"
_CHECKED_TOKENS = 16


class RouterReplay:
    """The routers of a model, which take recorded experts once they are set.

    Raises:
        ConfigError: the model has no routers, or these weigh experts by another rule.
    """

    def __init__(self, model: Any, setting: str) -> None:
        routers = routers_of(model)
        if not routers:
            raise ConfigError(f"{KEY}=R3, {setting}: the model has no experts to replay; set it to disabled")
        normalises = _normalises(next(iter(routers.values())), setting)
        self._routers: list[tuple[int, Any]] = []
        for name, router in routers.items():
            router.recorded, router.unknown, router.normalises = None, None, normalises
            router.register_forward_hook(_replay)
            number = re.search(r"\.(\d+)\.", name)
            assert number is not None, f"{name} is in a layer"
            self._routers.append((int(number[1]), router))

    def set(self, routes: Tensor | None) -> None:
        """Take the experts of the tokens of the next pass and, where layers are computed again, of its backward pass.

        Args:
            routes: (B, L, layers, experts per token) of the B * L tokens (protocol/sequences.py); None: routers choose.
        """
        unknown = None if routes is None else are_unknown(routes).flatten().unsqueeze(-1)
        for layer, router in self._routers:
            router.unknown = unknown
            router.recorded = None if routes is None else routes[:, :, layer].flatten(0, 1).long()


def routers_of(model: Any) -> dict[str, Any]:
    """The modules whose logits transformers records as those of routers, by name."""
    recorders = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    known = [one for one in (recorders if isinstance(recorders, list) else [recorders]) if one is not None]
    wanted = [(getattr(one, "target_class", one), getattr(one, "layer_name", None) or "") for one in known]
    modules = model.named_modules()
    return {n: module for n, module in modules if any(isinstance(module, kind) and part in n for kind, part in wanted)}


def _replay(router: Any, _: Any, output: Any) -> Any:
    """Put the recorded experts, and what they weigh, in the place of the router's own."""
    if router.recorded is None:
        return output
    logits, weights, own = output
    chosen = torch.where(router.unknown, own, router.recorded)
    return logits, _weights(logits, chosen, normalises=router.normalises).to(weights.dtype), chosen


def _weights(logits: Tensor, chosen: Tensor, *, normalises: bool) -> Tensor:
    weights = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) if normalises else weights


@torch.no_grad()
def _normalises(router: nn.Module, setting: str) -> bool:
    """Tell by which of the two rules a router weighs the experts that it chooses itself, on made-up numbers."""
    tried = copy.deepcopy(router).to_empty(device="cpu").float()
    random = torch.Generator().manual_seed(0)
    for tensor in (*tried.parameters(), *tried.buffers()):
        tensor.copy_(torch.randn(tensor.shape, generator=random))
    size = next((weight.shape[-1] for weight in tried.parameters() if weight.dim() == 2), 1)
    try:
        logits, weights, own = tried(torch.randn(_CHECKED_TOKENS, size, generator=random))
        for normalises in (True, False):
            if torch.allclose(_weights(logits, own, normalises=normalises), weights, atol=1e-6):
                return normalises
    except (TypeError, ValueError, RuntimeError, AttributeError):  # it returns something else
        pass
    raise ConfigError(
        f"{KEY}=R3, {setting}: {type(router).__name__} weighs experts by another rule than the softmax of their "
        "logits, and cannot replay recorded ones; set it to disabled"
    )
