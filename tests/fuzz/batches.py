"""Random batches: masks with holes, empty rows, numbers on grids whose small sums float32 adds exactly."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from hypothesis import reject, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance.papers import Rows, Undecided, by_token, masked
from conformance.papers.policy_losses import Row

# For each of many pairs of options.
FEW = settings(max_examples=settings().max_examples // 4)
# Of float32 sums of a few dozen terms, relative to the sum of their sizes.
RTOL = 1e-5
# Of a central difference in float64: the truncation is of order STEP^2, the rounding of order 1e-16 / STEP.
STEP = 1e-5
NAN = float("nan")


@dataclass(frozen=True)
class Shape:
    """Rows and columns of a batch, and which tokens count."""

    rows: int
    columns: int
    masks: Rows

    def on_grid(self, low: int, high: int, parts: int) -> st.SearchStrategy[Rows]:
        """A number for each token: from low / parts to high / parts in steps of 1 / parts."""
        number = st.integers(low, high).map(lambda value: value / parts)
        row = st.lists(number, min_size=self.columns, max_size=self.columns)
        return st.lists(row, min_size=self.rows, max_size=self.rows)

    def hide(self, rows: Rows) -> Tensor:
        """(N, T) float32, nan off the mask: nothing may look there."""
        return torch.tensor(by_token(lambda value, m: value if m else NAN, rows, self.masks))

    @property
    def mask(self) -> Tensor:
        return torch.tensor(self.masks)

    @property
    def counts(self) -> dict[str, int]:
        """Of the whole, for losses of parts."""
        tokens = int(sum(map(sum, self.masks)))
        return {"global_tokens": tokens, "global_sequences": sum(any(mask) for mask in self.masks)}

    def trained(self, *columns: Rows) -> list[Rows]:
        """Of each response the numbers of its trained tokens, column by column."""
        return [[masked(row, mask) for row in rows] for *rows, mask in zip(*columns, self.masks, strict=True)]

    def in_place(self, rows: Rows, off: float = 0.0) -> Rows:
        """Numbers of trained tokens, row by row, at their places; `off` elsewhere."""
        numbers = iter(value for row in rows for value in row)
        return [[float(next(numbers)) if m else off for m in mask] for mask in self.masks]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Any mask: full rows, prefixes, holes, nothing."""
    rows, columns = draw(st.sampled_from([3, 4, 5, 2, 1])), draw(st.sampled_from([4, 5, 6, 3, 2, 1]))
    full = 2**columns - 1
    bits = st.one_of(st.integers(0, full), st.integers(1, full), st.just(full), st.just(0))
    numbers = draw(st.lists(bits, min_size=rows, max_size=rows))
    return Shape(rows, columns, [[float(number >> t & 1) for t in range(columns)] for number in numbers])


@dataclass(frozen=True)
class Batch:
    """What a policy loss is given; log-probs in nats, weights of the tokens against the sampler or None."""

    shape: Shape
    new: Rows
    old: Rows
    advantages: Rows
    weights: Rows | None = None

    @property
    def columns(self) -> dict[str, Tensor]:
        """The columns of `compute_policy_loss`, nan off the mask."""
        hide = self.shape.hide
        columns = {"log_probs": hide(self.new).requires_grad_(), "old_log_probs": hide(self.old)}
        columns |= {"advantages": hide(self.advantages), "response_mask": self.shape.mask}
        return columns | ({} if self.weights is None else {"rollout_is_weights": hide(self.weights)})

    def trained(self, selected: set[tuple[int, int]]) -> list[Row]:
        """The trained tokens of each response that has one, some of them `selected` by row and place."""
        weights = self.weights or by_token(lambda _: 1.0, self.old)
        rows = self.shape.trained(self.new, self.new, self.old, self.advantages, weights)
        places = ([(i, t) for t, counts in enumerate(mask) if counts] for i, mask in enumerate(self.shape.masks))
        return [Row(*row, [place in selected for place in own]) for row, own in zip(rows, places, strict=True) if own]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Ratios from 0.2 to 4.5, on policy too; one advantage a response (0 too), or one a token (not 0)."""
    shape = draw(shapes())
    old, change = draw(shape.on_grid(-48, -4, 16)), draw(shape.on_grid(-24, 24, 16) | shape.on_grid(-5, 5, 16))
    new = by_token(lambda o, c: min(o + c, -0.125), old, change)
    advantages = draw(shape.on_grid(-8, 8, 4))
    if draw(st.booleans()):
        advantages = [[row[0]] * shape.columns for row in advantages]
    else:
        advantages = [[value or 0.5 for value in row] for row in advantages]
    return Batch(shape, new, old, advantages, draw(st.none() | shape.on_grid(1, 12, 4)))


def cuts(rows: int) -> st.SearchStrategy[list[slice]]:
    return st.sampled_from([1, 2]).map(lambda size: [slice(i, i + size) for i in range(0, rows, size)])


@contextmanager
def decided() -> Iterator[None]:
    """Passes over a batch on which rounding would decide."""
    try:
        yield
    except Undecided:
        reject()


def check_in_parts(
    loss: Callable[..., tuple[Tensor, object]],
    columns: dict[str, Tensor],
    parts: list[slice],
    shape: Shape,
    expected: float,
    slopes: Rows,
    scale: float,
) -> None:
    """The losses of a batch's parts, with the counts of the whole, and their gradients are the expected ones."""
    cut = [{name: values[part] for name, values in columns.items()} for part in parts]
    found = sum((loss(part, **shape.counts)[0] for part in cut), torch.zeros(()))
    assert_with_gradient(found, expected, columns["log_probs"], slopes, scale=scale)


def slopes(function: Callable[[Rows], float], rows: Rows, masks: Rows | None = None) -> Rows:
    """A function differentiated by each number of its rows; with masks 0 off them."""

    def at(i: int, t: int, x: float) -> float:
        return function([*rows[:i], [*rows[i][:t], x, *rows[i][t + 1 :]], *rows[i + 1 :]])

    return [
        [
            0.0 if masks and not masks[i][t] else derivative(lambda x, i=i, t=t: at(i, t, x), value)
            for t, value in enumerate(row)
        ]
        for i, row in enumerate(rows)
    ]


def derivative(function: Callable[[float], float], x: float) -> float:
    return (function(x + STEP) - function(x - STEP)) / (2 * STEP)


def assert_near(found: Tensor, expected: object, *, scale: float = 1.0) -> None:
    """Equal but for the rounding of float32 in numbers of the size `scale`."""
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.detach().double(), wanted, rtol=RTOL, atol=RTOL * max(scale, 0.1))


def assert_with_gradient(found: Tensor, expected: object, inputs: Tensor, slopes: Rows, *, scale: float = 1.0) -> None:
    """`assert_near` of numbers, and of the gradient of their sum by the inputs."""
    found.sum().backward()
    assert_near(found, expected, scale=scale)
    assert inputs.grad is not None
    assert_near(inputs.grad, slopes, scale=scale)
