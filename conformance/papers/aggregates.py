"""Token losses to one number."""

from collections.abc import Callable

from conformance.papers import Rows, masked, mean

Aggregate = Callable[[Rows, Rows, float], float]


def token_mean(losses: Rows, masks: Rows, scale: float) -> float:
    """DAPO (arXiv 2503.14476): every token of the batch weighs the same."""
    return mean([loss for row in counting(losses, masks) for loss in row])


def token_sum(losses: Rows, masks: Rows, scale: float) -> float:
    """The sum over all tokens."""
    return sum(sum(row) for row in counting(losses, masks))


def seq_mean_token_mean(losses: Rows, masks: Rows, scale: float) -> float:
    """DeepSeekMath (arXiv 2402.03300): 1/G sum_i 1/|o_i| sum_t; responses without a token do not count."""
    return mean([sum(row) / len(row) for row in counting(losses, masks)])


def seq_mean_token_sum(losses: Rows, masks: Rows, scale: float) -> float:
    """Dr. GRPO (arXiv 2503.20783): 1/G sum_i sum_t."""
    return mean([sum(row) for row in counting(losses, masks)])


def seq_mean_token_sum_norm(losses: Rows, masks: Rows, scale: float) -> float:
    """Dr. GRPO's code: the sum divided by a constant length."""
    return mean([sum(row) / scale for row in counting(losses, masks)])


def prompt_mean(losses: Rows, masks: Rows, index: list[str]) -> float:
    """ScaleRL (arXiv 2510.13786): the mean over prompts of the mean over all tokens of their responses."""
    prompts: dict[str, list[float]] = {}
    for loss, mask, prompt in zip(losses, masks, index, strict=True):
        prompts.setdefault(prompt, []).extend(masked(loss, mask))
    return mean([mean(tokens) for tokens in prompts.values() if tokens])


def counting(losses: Rows, masks: Rows) -> Rows:
    """The tokens that count, of each response that has one."""
    rows = [masked(loss, mask) for loss, mask in zip(losses, masks, strict=True)]
    return [row for row in rows if row]


AGGREGATES: dict[str, Aggregate] = {
    "token-mean": token_mean,
    "token-sum": token_sum,
    "prompt-mean": seq_mean_token_mean,  # of one response a prompt
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}
