"""A teacher that a vLLM server runs: what it tells of its likeliest tokens at each place of a response."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_dist.algorithms.settings import TOP_IDS, TOP_LOG_PROBS
from grpo_dist.config.schema_roles import TeacherEndpointConfig
from grpo_dist.errors import RewardError
from grpo_dist.protocol import Ragged
from grpo_dist.redact import redact_text
from grpo_dist.rewards.http_reward import post_json, show

SECTION = "actor_rollout_ref.ref.model.endpoint"
KEY = f"{SECTION}.base_url"
AT_ONCE = 8  # requests of one process


@dataclass(frozen=True)
class TeacherEndpoint:
    """Asks by the section of the config, which has an address."""

    section: TeacherEndpointConfig

    def columns(self, prompts: Ragged, responses: Ragged) -> dict[str, Ragged]:
        """Return `ref_top_ids` and `ref_top_log_probs` of responses: (N, R_i, K), the likeliest token first; nats.

        Raises:
            RewardError: the server does not answer, or not as vLLM does.
        """
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(self._ask, prompts.rows(), responses.rows()))
        ids, log_probs = zip(*answers, strict=True)
        return {TOP_IDS: Ragged.from_rows(ids, torch.int32), TOP_LOG_PROBS: Ragged.from_rows(log_probs, torch.float32)}

    def _ask(self, prompt: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
        section, asked = self.section, [*prompt.tolist(), *response.tolist()]
        url, count = f"{str(section.base_url).rstrip('/')}/completions", section.top_k
        # vLLM's own name: OpenAI's `logprobs` tells no ids
        body = {"model": section.model, "prompt": asked, "max_tokens": 1, "prompt_logprobs": count}
        answer = post_json(url, body, timeout_s=section.timeout_s, headers_env=section.headers_env, key=KEY)
        try:
            places = answer["choices"][0]["prompt_logprobs"][len(prompt) :]
            top = [
                sorted((-entry["logprob"], int(token)) for token, entry in place.items())[:count] for place in places
            ]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            top = []
        if len(top) != len(response) or any(len(place) < count for place in top):
            wanted = f"choices[0].prompt_logprobs with {count} tokens at each of {len(asked)} places"
            raise RewardError(
                f"{KEY}={redact_text(str(section.base_url))}: expected {wanted}, as a server with --max-logprobs "
                f"{count} or more gives them; got {show(answer)}"
            )
        pairs = torch.tensor(top, dtype=torch.float64).reshape(len(top), count, 2)
        return pairs[..., 1], -pairs[..., 0]
