"""What the chunked output layer computes from a chunk of logits, and the gradient of it. See lm_head.py.

Both functions run as they are, or compiled: then each reads the logits once and keeps nothing of their size but its
result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenValues(NamedTuple):
    """(tokens,) float32 numbers: log-probs, logsumexp, entropies, exact KL, squared norms of the log-probs' gradients
    and the probability of a teacher's tokens; or the gradients of these, of the last two None. None if not asked for.
    """

    log_probs: Tensor
    sums: Tensor | None = None
    entropies: Tensor | None = None
    exact_kl: Tensor | None = None
    gradient_norms: Tensor | None = None
    mass: Tensor | None = None

    def part(self, tokens: slice) -> TokenValues:
        """Return the values of some tokens."""
        return TokenValues._make(None if values is None else values[tokens] for values in self)


class TopTokens(NamedTuple):
    """What a teacher tells of its likeliest tokens: ids (tokens, K) int64, and (tokens, K) float32 log-probs over the
    temperature.
    """

    ids: Tensor
    log_probs: Tensor

    def part(self, tokens: slice) -> TopTokens:
        """Return those at some tokens."""
        return TopTokens(self.ids[tokens], self.log_probs[tokens])

    def compared(self, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """Return the policy's log-probs among these tokens, (tokens, K), and these less the teacher's among them.

        Both are of distributions over the K tokens alone. `scaled` are the policy's logits over the temperature.
        """
        own = torch.log_softmax(scaled.gather(1, self.ids), -1)
        return own, own - torch.log_softmax(self.log_probs, -1)


def token_values(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    reference: Tensor | None,
    *,
    entropies: bool,
    gradient_norms: bool = False,
    top: TopTokens | None = None,
) -> TokenValues:
    """Return the values of tokens.

    Args:
        logits: (tokens, V); left as they are.
        targets: (tokens,) int64.
        temperature: both logits are divided by it.
        reference: (tokens, V) logits of the reference; None: no KL.
        entropies: whether to compute them.
        gradient_norms: whether to compute 1 - 2 p_y + sum p^2, which is |d log p_y / d logits|^2 at temperature 1.
        top: in the place of `reference`: the KL is over these tokens alone, as if there were no others.
    """
    scaled, column = _scaled(logits, temperature), targets.unsqueeze(1)
    log_p = torch.log_softmax(scaled, -1)
    log_probs = log_p.gather(1, column).squeeze(1)
    sums = scaled.gather(1, column).squeeze(1) - log_probs
    entropy = kl = norms = None
    if entropies or gradient_norms or reference is not None:
        p = log_p.exp()
        if gradient_norms:
            norms = 1 - 2 * log_probs.exp() + p.square().sum(1)
        if entropies:
            entropy = -(p * log_p).sum(1)
        if reference is not None:
            kl = (p * log_p.sub_(torch.log_softmax(_scaled(reference, temperature), -1))).sum(1)
    mass = None
    if top is not None:
        own, difference = top.compared(scaled)
        kl, mass = (own.exp() * difference).sum(1), log_p.gather(1, top.ids).exp().sum(1)
    return TokenValues(log_probs, sums, entropy, kl, norms, mass)


def logits_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    reference: Tensor | None,
    values: TokenValues,
    gradients: TokenValues,
    top: TopTokens | None = None,
) -> Tensor:
    """Return the (tokens, V) gradient of logits divided by the temperature, in their type.

    Args:
        logits: (tokens, V); overwritten if they are float32.
        targets: (tokens,) int64.
        temperature: both logits are divided by it.
        reference: (tokens, V) logits of the reference; None: no KL.
        values: of `token_values`.
        gradients: of these.
        top: see `token_values`.
    """
    assert values.sums is not None
    of_top = None
    if top is not None and gradients.exact_kl is not None and values.exact_kl is not None:
        own, difference = top.compared(_scaled(logits, temperature))
        of_top = own.exp() * (difference - values.exact_kl.unsqueeze(1)) * gradients.exact_kl.unsqueeze(1)
    log_p = _scaled(logits, temperature).sub_(values.sums.unsqueeze(1))
    p = log_p.exp() if gradients.entropies is not None or reference is not None else log_p.exp_()
    factor = -gradients.log_probs.unsqueeze(1)
    if gradients.entropies is not None and values.entropies is not None:
        factor = factor - gradients.entropies.unsqueeze(1) * (log_p + values.entropies.unsqueeze(1))
    if reference is not None and gradients.exact_kl is not None and values.exact_kl is not None:
        log_p.sub_(torch.log_softmax(_scaled(reference, temperature), -1)).sub_(values.exact_kl.unsqueeze(1))
        factor = factor + log_p.mul_(gradients.exact_kl.unsqueeze(1))
    grad = p.mul_(factor)
    if torch.compiler.is_compiling():  # in one pass with all the rest
        is_target = torch.arange(logits.shape[1], device=logits.device) == targets.unsqueeze(1)
        grad = torch.where(is_target, grad + gradients.log_probs.unsqueeze(1), grad)
    else:
        grad.scatter_add_(1, targets.unsqueeze(1), gradients.log_probs.unsqueeze(1))
    if top is not None and of_top is not None:
        grad.scatter_add_(1, top.ids, of_top)
    return grad.to(logits.dtype)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.float() if temperature == 1 else logits.float() / temperature
