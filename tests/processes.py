"""Processes for tests: reserved on their own and released at the end, so that no test starves the next one."""

import asyncio
import contextlib
import ipaddress
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from grpo_dist.plan.placement import slots_of
from grpo_dist.runtime.event_loop import TimeLimits, blocking
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.resources import Bundle, release, reserve
from tests.observed import command_line


def open_to_others(process: psutil.Process) -> dict[str, list[str]]:
    """By command line, the addresses other than loopback where a process or one of its descendants listens."""
    found = {}
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            ips = [c.laddr.ip for c in each.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            if others := [ip for ip in ips if not is_loopback(ip)]:
                found[f"{each.pid} {command_line(each)[:80]}"] = others
    return found


def is_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


# Logical CPUs of each process: all that run at the same time fit into a small cluster.
SHARE = 0.01


@contextmanager
def reserved(**counts: int) -> Iterator[Mapping[str, list[Bundle]]]:
    """Bundles for so many processes of each role. At the end whatever still runs in them is killed."""
    homes = {role: [0] * count for role, count in counts.items()}
    groups, bundles = reserve(slots_of(homes, dict.fromkeys(counts, (SHARE, 0.0))))
    try:
        yield bundles
    finally:
        release(groups)


@contextmanager
def spawned(
    role: str, worker_class: type, args: Sequence[tuple], env: Mapping[str, str] | None = None
) -> Iterator[WorkerGroup]:
    """The processes of a role, one for each of `args`."""
    concurrency = 100 if role == "rollout" else 1
    with reserved(**{role: len(args)}) as bundles:
        yield WorkerGroup.spawn(
            role, worker_class, bundles[role], args=args, limits=TimeLimits(240.0), env=env, max_concurrency=concurrency
        )


@blocking
async def start_together(*starts: Coroutine[Any, Any, Any]) -> None:
    """Start several roles at the same time."""
    await asyncio.gather(*starts)
