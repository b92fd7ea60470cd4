"""Checkpoints of a model of about 1 GB: `python -m benchmarks.checkpoints`. Some minutes on two cores; 8 GB of memory.

A Qwen3 with random weights and AdamW states, sharded over some ranks, is saved by the run's own saver, in the
background and waited for; then it is loaded on as many ranks, on half of them and so on down to one.

- `blocked`: seconds that a training step waits: until all ranks have copied their state, or, where it is waited for,
  until the checkpoint is whole. `whole`: seconds until it is on disk with its manifest, under its name.
- `disk`: seconds in which one process writes and flushes as many bytes; `copy`: in which it copies them in memory.
- `verify`: seconds in which the driver compares all files with their digests; `load`: in which the ranks read them.
  Both read from the disk: what the kernel keeps of the files is dropped before.
- Memory is that of all ranks together, shared pages counted once, MiB: before the first save, and at its peak.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import checkpoint_ranks, record

# 260 million parameters: 1.04 GB in fp32, 3.1 GB with AdamW's states.
QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32_000,
    "tie_word_embeddings": True,
}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/checkpoints.json"))
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; without it that of temporary files")
    parser.add_argument("--layers", type=int, default=QWEN3["num_hidden_layers"], help="of the model")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="saves of each kind, in turns; seconds are medians")
    options = parser.parse_args()
    result: dict[str, Any] = record.begun()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        checkpoint_ranks.write_model(folder / "model", QWEN3 | {"num_hidden_layers": options.layers})
        saves, loads = checkpoint_ranks.measure(folder, options.ranks, options.rounds)
    print(record.table("saves", saves))
    print(record.table("loads", loads))
    ratios = {f"checkpoints/{row['save']}, of writing as much": row["disk"] / row["whole"] for row in saves}
    ratios["checkpoints/training waits, of a copy"] = saves[0]["copy"] / saves[0]["blocked"]
    record.write(options.output, result | {"saves": saves, "loads": loads}, ratios)
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
