"""Emulated machines: what they share, what each has of its own, and what a slow network between them costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.machines import Machines, machines
from tests.cluster.slow_switch import Link

pytestmark = pytest.mark.long
BYTES, TRIPS = 2_000_000, 5
SERVE = """
import socket
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    peer, _ = server.accept()
    for _ in range(TRIPS):
        peer.sendall(peer.recv(1))
    left = BYTES
    while left:
        left -= len(peer.recv(1 << 20))
    peer.sendall(b".")
"""
ASK = """
import json, socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as peer:
    trips = []
    for _ in range(TRIPS):
        started = time.monotonic()
        peer.sendall(b".")
        peer.recv(1)
        trips.append(time.monotonic() - started)
    started = time.monotonic()
    peer.sendall(b"." * BYTES)
    peer.recv(1)
    print(json.dumps([trips, time.monotonic() - started]))
"""


def measured(there: Machines) -> tuple[list[float], float]:
    """Seconds of each round trip between the last machine and the first, and of so many bytes in one direction."""
    sizes = f"TRIPS, BYTES = {TRIPS}, {BYTES}\n"
    server = there.start(0, sys.executable, "-c", sizes + SERVE, env=os.environ)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n", server.communicate()
    last = len(there.names) - 1
    asks = there.start(last, sys.executable, "-c", sizes + ASK, there.addresses[0], env=os.environ)
    out, err = asks.communicate(timeout=60)
    assert asks.returncode == 0, err
    trips, sending = json.loads(out)
    return trips, sending


@pytest.mark.parametrize("link", [None, Link(0.02, 80e6)], ids=["bridge", "slow"])
def test_the_network(tmp_path: Path, link: Link | None) -> None:
    with machines(3, tmp_path, link) as there:
        trips, sending = measured(there)
    print(f"{link}: {1000 * min(trips):.2f} to {1000 * max(trips):.2f} ms, {8e-6 * BYTES / sending:.0f} Mbit/s")
    if link is not None:
        assert min(trips) >= 2 * link.delay_s
        assert sending >= 8 * BYTES / link.bits_per_s


def test_each_machine_has_its_own_name_and_private_folder(tmp_path: Path) -> None:
    tell = "import pathlib, socket, sys; pathlib.Path(sys.argv[1], 'mine').write_text(socket.gethostname())"
    with machines(2, tmp_path) as there:
        for number in (0, 1):
            process = there.start(number, sys.executable, "-c", tell, str(there.private), env=os.environ)
            assert process.wait(60) == 0
            assert (there.own(number) / "private" / "mine").read_text() == f"node{number}"
        listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
        assert all(name in listed for name in there.names)
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert not any(name in listed for name in there.names)
