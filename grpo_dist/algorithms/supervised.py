"""The loss of supervised fine-tuning: the cross entropy of what the model should say."""

from __future__ import annotations

from torch import Tensor

from grpo_dist.algorithms.aggregate import agg_loss


def supervised_loss(log_probs: Tensor, mask: Tensor, *, global_tokens: float | Tensor) -> Tensor:
    """The mean cross entropy of the trained tokens, in nats.

        loss = sum over trained tokens t of -log pi(y_t | x, y_<t) / global tokens

    What InstructGPT (arXiv 2203.02155, section 3.5) and DeepSeekMath (arXiv 2402.03300, appendix A.1.1) train on before
    RL. Every trained token weighs the same, in long answers and in short ones, as in verl's and TRL's SFT trainers;
    DeepSeekMath's formula has the mean of each answer first. The count is that of the whole mini-batch, so
    micro-batches and ranks only add up.

    Args:
        log_probs: (N, T) log-probs at temperature 1, in nats; carries the gradient.
        mask: (N, T), 1 on the tokens that are trained.
        global_tokens: trained tokens of the whole mini-batch, over all ranks.

    Returns:
        A scalar, float32; 0 where nothing is trained.

    Raises:
        BatchError: the shapes differ.
    """
    return agg_loss(-log_probs, mask, "token-mean", global_tokens=global_tokens)
