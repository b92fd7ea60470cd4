"""An auction as an environment: the policy bids three times, and each time a rival bids more.

usage: python examples/environment/auction.py FOLDER      write the rows, train.jsonl and validation.jsonl
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

ROWS = {"train": 2000, "validation": 100}
LIMIT, BIDS = 999, 3  # the highest bid that is taken, and how many the policy has
ANSWER = re.compile(r"#### (\d+)")


class Auction:
    """One auction; each episode has its own."""

    def reset(self, price: int, raises: list[int], **columns: object) -> str:
        """Begin with a price; `raises` is by how much the rival goes above each bid."""
        self.price, self.raises, self.taken, self.done = price, raises, 0, False
        return f" {price}?"

    def bid(self, amount: int) -> str:
        """Bid more than the price.

        Args:
            amount: The bid.
        """
        if not self.price < amount <= LIMIT:
            self.done = True
            return "no"
        self.price = amount + self.raises[self.taken]
        self.taken += 1
        self.done = self.taken == BIDS
        return f"{self.price}?"

    def get_reward(self) -> dict[str, float]:
        """The share of bids that were taken; validation reports `acc`, whether all were."""
        return {"score": self.taken / BIDS, "acc": float(self.taken == BIDS)}


def calls(text: str) -> list[tuple[str, str]]:
    """Read the call in the built-in model's own form, an answer behind ####."""
    return [("bid", json.dumps({"amount": int(amount)})) for amount in ANSWER.findall(text)[-1:]]


def rows(split: str) -> list[dict[str, object]]:
    """The rows of "train" or "validation"."""
    rng = random.Random(split)
    prompt = [{"role": "user", "content": "auction"}]
    games = [
        {"price": rng.randint(100, 300), "raises": [rng.randint(1, 99) for _ in range(BIDS)]}
        for _ in range(ROWS[split])
    ]
    return [{"data_source": "auction", "prompt": prompt, "extra_info": game} for game in games]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in ROWS:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(name)))
