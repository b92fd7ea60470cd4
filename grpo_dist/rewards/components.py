"""Which components of the reward `adv_estimator=gdpo` compares, and their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from grpo_dist.errors import ConfigError
from grpo_dist.names import OVERLONG_PENALTY

KEYS, WEIGHTS = "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"


def chosen_components(
    keys: Sequence[str] | None,
    weights: Sequence[float] | None,
    *,
    declared: Mapping[str, float],
    overlong_penalty: bool,
    returned: Iterable[str] = (),
) -> dict[str, float]:
    """The components by name, in order, with their weights.

    Args:
        keys: `algorithm.gdpo_reward_keys`; None: those declared, and the overlong penalty if there is one.
        weights: `algorithm.gdpo_reward_weights`; None: those declared, and 1 for the others.
        declared: the components that the reward function declares, with their weights.
        overlong_penalty: whether `reward.overlong_buffer` is enabled.
        returned: the names of the values that the function has returned beside the score, if known; for messages.

    Raises:
        ConfigError: there are no components, or a key is not among those that the function declares, or there are
            more or fewer weights than keys.
    """
    known = {**declared, **({OVERLONG_PENALTY: 1.0} if overlong_penalty else {})}
    if keys is None and not declared:
        names = sorted(set(returned) - {OVERLONG_PENALTY})
        found = f", which returns {', '.join(names)}" if names else ""
        raise ConfigError(
            f"{KEYS}=null: the reward function declares no components{found}; name those of its values that gdpo is to "
            "compare, or set custom_reward_function.path=grpo_dist.rewards.weighted, whose functions are components"
        )
    chosen = tuple(known) if keys is None else keys
    for key in chosen:
        if declared and key not in known and key.partition(".")[0] not in declared:  # LABEL.NAME: a value beside it
            raise ConfigError(f"{KEYS}={','.join(chosen)}: {key} is no component; the reward has {', '.join(known)}")
    if weights is not None and len(weights) != len(chosen):
        raise ConfigError(f"{WEIGHTS}: {len(weights)} weights for the {len(chosen)} components {', '.join(chosen)}")
    return dict(zip(chosen, weights or [known.get(key, 1.0) for key in chosen], strict=True))
