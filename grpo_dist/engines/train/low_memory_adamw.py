"""AdamW for 8-bit states and for bf16 weights, by torchao. Imported where a run needs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW8bit

from grpo_dist.engines.train.sharded_tensors import local_shard

PART = 1 << 22  # numbers, in whole blocks, that become codes at a time: that takes 50 bytes of each


class LowMemoryAdamW(AdamW8bit):
    """AdamW whose states are blocks of 8-bit codes, or float32 where they are small or `block_size` is infinite.

    A bf16 weight, of which most updates are less than half of the last bit, is rounded up or down at random.
    """

    def step(self, closure: Any = None) -> None:
        """Take a step with random numbers that its count decides: a resumed run and copies of a weight round alike."""
        [group], count = self.param_groups, next(iter(self.state.values()), {"step": 0})["step"]
        rate, device = group["lr"], group["params"][0].device
        # on CPU, compiling torchao's kernels takes longer than they save
        compiled = torch.compiler.set_stance("force_eager" if device.type == "cpu" else "default")
        with compiled, torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(count))
            group["lr"] = torch.tensor(rate)  # for a number, they would be compiled at every rate
            super().step(closure)
        group["lr"] = rate

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over float32 states, as AdamW has them; torch would cast them to the type of the weights."""
        super().load_state_dict({**state_dict, "state": {}})
        [saved], [group] = state_dict["param_groups"], self.param_groups
        for name, weight in zip(saved["params"], group["params"], strict=True):
            state = self.state[weight] = dict(state_dict["state"][name])
            for key in ("exp_avg", "exp_avg_sq"):
                numbers, state[key] = local_shard(state[key]).reshape(-1), self._new_buffer(weight, key == "exp_avg")
                own = local_shard(state[key]).view(-1)
                for start in range(0, len(numbers), PART):
                    own[start : start + PART].copy_(numbers[start : start + PART].to(own.device))

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        state = super()._new_buffer(p.float(), signed)  # in bf16 a decay of 0.999 would change nothing
        if signed and hasattr(codes := local_shard(state), "qmap"):
            # torchao's codes have 1 and no -1. With both, a block's largest number is its scale, and what a checkpoint
            # gives back becomes the codes and scales that were written, bit for bit.
            codes.qmap[0] = -1.0
        return state
