"""How large the tensors of a computation are, whichever machine it runs on."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Largest(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        tensors = (each for each in tree_leaves(found) if isinstance(each, torch.Tensor))
        self.numbers = max([self.numbers, *(each.numel() for each in tensors)])
        return found


def largest_tensor(work: Callable[[], Any]) -> int:
    """Numbers in the largest tensor that an operation of `work` returns, those of its backward passes included."""
    with _Largest() as seen:
        work()
    return seen.numbers
