"""The losses beside the policy's: of supervised fine-tuning, of training a reward model, and of a critic's values.

Fine-tuning takes the cross entropy of what the model should say. A reward model gives a sequence, or a step of it, one
number r; its losses, of pairs of which one is preferred and of labelled steps or responses, are logistic regressions on
it. All divide by a count of the whole mini-batch, so micro-batches and ranks only add up.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from grpo_dist.algorithms.aggregate import agg_loss, check_shapes, masked_mean


def supervised_loss(log_probs: Tensor, mask: Tensor, *, global_tokens: float | Tensor) -> Tensor:
    """The mean cross entropy of the trained tokens, in nats: a float32 scalar, 0 where nothing is trained.

        loss = sum over trained tokens t of -log pi(y_t | x, y_<t) / global tokens

    What InstructGPT (arXiv 2203.02155, section 3.5) and DeepSeekMath (arXiv 2402.03300, appendix A.1.1) train on before
    RL. Every trained token weighs the same, in long answers and in short ones, as in verl's and TRL's SFT trainers;
    DeepSeekMath's formula has the mean of each answer first.

    Args:
        log_probs: (N, T) log-probs at temperature 1, in nats; carries the gradient.
        mask: (N, T), 1 on the tokens that are trained.
        global_tokens: trained tokens of the whole mini-batch, over all ranks.
    """
    return agg_loss(-log_probs, mask, "token-mean", global_tokens=global_tokens)


def pair_loss(chosen: Tensor, rejected: Tensor, *, global_pairs: float | Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of pairs under the model of Bradley and Terry, P(chosen is preferred) = sigmoid(margin).

        margin = r_chosen - r_rejected
        loss   = sum over pairs of -log sigmoid(margin) / global pairs

    InstructGPT (arXiv 2203.02155), equation 1, for pairs that weigh the same; TRL's RewardTrainer computes it too. The
    loss of a model that tells nothing apart is log 2 = 0.693.

    Args:
        chosen: (P,) float32 scores of the preferred sequences; carries the gradient.
        rejected: (P,) float32 scores of the others, pair by pair; likewise.
        global_pairs: pairs of the whole mini-batch, over all ranks.

    Returns:
        (loss, metrics): a scalar; and means over these pairs: `reward_model/margin`, and `reward_model/accuracy`, the
        share of pairs with margin > 0. A tie counts as wrong, as in TRL: a model that gives every sequence the same
        score then shows as 0, and is not taken for one that guesses.
    """
    check_shapes("rejected", rejected, chosen=chosen)
    margin = chosen.float() - rejected.float()
    loss = -logsigmoid(margin).sum() / max(float(global_pairs), 1.0)
    every_pair = torch.ones_like(margin)
    return loss, {
        "reward_model/accuracy": masked_mean((margin > 0).float(), every_pair),
        "reward_model/margin": masked_mean(margin, every_pair),
    }


def label_loss(
    values: Tensor, labels: Tensor, mask: Tensor, *, global_labels: float | Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of labelled tokens: binary cross entropy, where sigmoid(r) is the probability of the label 1.

        loss = sum over labelled tokens of -(y log sigmoid(r) + (1 - y) log(1 - sigmoid(r))) / global labels

    With a label for each step this is the process reward model of Math-Shepherd (arXiv 2312.08935), whose hard label of
    a step is 1 if a correct answer was reached from there. With one label for each response it is the outcome reward
    model that the paper compares it with.

    Args:
        values: (N, T) the model's outputs; carries the gradient.
        labels: (N, T) 0 or 1; read where the mask is 1.
        mask: (N, T), 1 on labelled tokens.
        global_labels: labelled tokens of the whole mini-batch, over all ranks.

    Returns:
        (loss, metrics): a scalar, and `reward_model/accuracy`, the share of labelled tokens where r > 0 exactly if
        the label is 1. As everywhere, r = 0 counts as a 0.
    """
    check_shapes("values", values, labels=labels, mask=mask)
    # before the loss, not after: the gradient of a masked inf is nan, and 0 * nan is nan
    values, labels = (column.float().where(mask.bool(), 0.0) for column in (values, labels))
    losses = binary_cross_entropy_with_logits(values, labels, reduction="none").where(mask.bool(), 0.0)
    right = ((values > 0) == (labels > 0)).float()
    return losses.sum() / max(float(global_labels), 1.0), {"reward_model/accuracy": masked_mean(right, mask)}


def compute_value_loss(
    *,
    vpreds: Tensor,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    global_tokens: float | Tensor | None = None,
    global_sequences: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """max((v - R)^2, (clip(v, v_old +- cliprange) - R)^2) / 2, aggregated. PPO (arXiv 1707.06347); as verl's.

    Args:
        vpreds: (N, T), the critic's values; carries the gradient.
        values: (N, T), its values before the update.
        returns: (N, T), what they should have been.
        response_mask: (N, T), 1 on the tokens that train.
        loss_agg_mode: see `aggregate`, as are the remaining arguments.

    Returns:
        (loss, metrics): a float32 scalar; and `critic/vf_loss`, the same without gradient, which like it adds up over
        micro-batches and ranks to the mini-batch's; and means over the tokens of this call: `critic/vf_clipfrac`, the
        share for which the clip decides, and `critic/vpred_mean`, the value.
    """
    check_shapes("vpreds", vpreds, values=values, returns=returns, response_mask=response_mask)
    # before the squares, not after: the gradient of a masked inf is nan, and 0 * nan is nan
    mask = response_mask.bool()
    vpreds, values, returns = (
        column.float().where(mask, 0.0) for column in (vpreds, values.detach(), returns.detach())
    )
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    plain_error, clipped_error = (vpreds - returns).square(), (clipped - returns).square()
    loss = 0.5 * agg_loss(
        torch.maximum(plain_error, clipped_error),
        response_mask.float(),
        loss_agg_mode,
        global_tokens=global_tokens,
        global_sequences=global_sequences,
        loss_scale_factor=loss_scale_factor,
    )
    return loss, {
        "critic/vf_loss": loss.detach(),
        "critic/vf_clipfrac": masked_mean((clipped_error > plain_error).float(), response_mask),
        "critic/vpred_mean": masked_mean(vpreds, response_mask),
    }
