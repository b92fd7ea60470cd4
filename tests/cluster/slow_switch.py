"""A switch that holds frames back, where `tc netem` is not: `python slow_switch.py DELAY_S BITS_PER_S PORT...`."""

import contextlib
import fcntl
import heapq
import itertools
import os
import select
import struct
import sys
import time
from dataclasses import dataclass

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
# Large frames: fewer of them at the same speed.
MTU = 9000
# Seconds of sending that wait in the switch. What is beyond waits in the sender's kernel.
QUEUE_S = 0.05


@dataclass(frozen=True)
class Link:
    """What each machine's line is like: seconds from one machine to another, and bits per second that one can send."""

    delay_s: float
    bits_per_s: float


def open_tap(name: str) -> int:
    """A new tap device's file descriptor. It stays that of the device when that moves to another network namespace."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def forward(taps: list[int], link: Link) -> None:
    """Forward frames without end."""
    homes: dict[bytes, int] = {}  # MAC address -> its port
    free_at = dict.fromkeys(taps, 0.0)  # when the line of a sender has sent all that it has taken
    held: list[tuple[float, int, int, bytes]] = []  # (when it arrives, order, port, frame)
    order = itertools.count()
    while True:
        now = time.monotonic()
        while held and held[0][0] <= now:
            _, _, tap, frame = heapq.heappop(held)
            with contextlib.suppress(OSError):  # the machine is gone
                os.write(tap, frame)
        senders = [tap for tap in taps if free_at[tap] - now < QUEUE_S]
        readable, _, _ = select.select(senders, [], [], max(held[0][0] - now, 0.0) if held else None)
        now = time.monotonic()
        for sender in readable:
            with contextlib.suppress(BlockingIOError):
                frame = os.read(sender, MTU + 18)
                target, source = frame[:6], frame[6:12]
                homes[source] = sender
                free_at[sender] = max(free_at[sender], now) + 8 * len(frame) / link.bits_per_s
                targets = [homes[target]] if target in homes else [tap for tap in taps if tap != sender]
                for tap in targets:
                    heapq.heappush(held, (free_at[sender] + link.delay_s, next(order), tap, frame))


if __name__ == "__main__":
    ports = [open_tap(name) for name in sys.argv[3:]]
    print("ready", flush=True)
    forward(ports, Link(float(sys.argv[1]), float(sys.argv[2])))
