"""Text of plans: tables, counts and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo_dist.config.memory import RoleMemory

# (label, value)
Rows = list[tuple[str, str]]


def table(rows: Rows) -> str:
    """Rows in two columns, indented."""
    width = max(len(label) for label, _ in rows)
    return indent([f"{label.ljust(width)}  {value}" for label, value in rows])


def indent(lines: Sequence[str]) -> str:
    """Lines below a heading."""
    return "\n".join(f"  {line}" for line in lines)


def many(count: int, one: str, more: str = "") -> str:
    """A count with its noun: "1 rank", "2 ranks"."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def added(parts: Mapping[str, float]) -> str:
    """Sizes in GiB by name, and their sum."""
    listed = " + ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
    return f"{listed} = {gib(sum(parts.values()))} GiB" if len(parts) > 1 else f"{listed} GiB"


def gib(size: float) -> str:
    """A size in GiB, with three digits where it is small."""
    return f"{size:.1f}" if size >= 10 else f"{size:.3g}" if size >= 0.01 else f"{size:.4f}"


def device_memory(role: RoleMemory) -> str:
    """The peak of a process on its device, by purpose."""
    return added(role.parts) + (f"; {role.remark}" if role.remark else "")
