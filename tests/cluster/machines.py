"""Several machines on this one: network namespaces with addresses, host names and /dev/shm; needs Linux and root."""

import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.cluster import slow_switch
from tests.cluster.slow_switch import MTU, Link

ENTER = """
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount --bind "$2/private" "$3"
shift 3
exec "$@"
"""


class Machines:
    """What `machines` made: their addresses by number, and `private`, a folder whose content is each machine's own."""

    def __init__(self, names: list[str], addresses: list[str], folder: Path) -> None:
        self.names, self.addresses, self.folder, self.private = names, addresses, folder, folder / "private"
        self.private.mkdir()
        for number in range(len(names)):
            (self.own(number) / "private").mkdir(parents=True)
            (self.own(number) / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 node{number}\n")

    def own(self, number: int) -> Path:
        """Where a machine's files are, seen from outside: `private` in it is its private folder."""
        return self.folder / f"machine{number}"

    def start(self, number: int, *command: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a command on a machine."""
        enter = ["ip", "netns", "exec", self.names[number], "unshare", "--mount", "--uts", "bash", "-c", ENTER, "enter"]
        return subprocess.Popen(
            [*enter, f"node{number}", str(self.own(number)), str(self.private), *command],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def pids_on(name: str) -> list[int]:
    """The processes on a machine."""
    found = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True).stdout
    return [int(pid) for pid in found.split()]


def lose(name: str, *, cut: bool) -> None:
    """Kill all on a machine; with `cut` its network goes first, so that its peers hear nothing, as without power."""
    if cut:
        _ip("-n", name, "link", "set", "eth0", "down")
    for pid in pids_on(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _plug_into_bridge(tag: str, names: Sequence[str]) -> None:
    """In a namespace of its own no firewall of this machine's, such as Docker's, comes between them."""
    _ip("-n", tag, "link", "add", "bridge", "type", "bridge")
    _ip("-n", tag, "link", "set", "bridge", "up")
    for number, name in enumerate(names):
        port = f"port{number}"
        _ip("link", "add", port, "netns", tag, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", tag, "link", "set", port, "master", "bridge", "up")


def _plug_into_slow_switch(link: Link, tag: str, names: Sequence[str]) -> None:
    ports = [f"port{number}" for number in range(len(names))]
    command = ["ip", "netns", "exec", tag, sys.executable, slow_switch.__file__]
    switch = subprocess.Popen(
        [*command, str(link.delay_s), str(link.bits_per_s), *ports], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert switch.stdout is not None
    if switch.stdout.readline() != b"ready\n":
        raise subprocess.CalledProcessError(switch.wait(), command, *switch.communicate())
    for port, name in zip(ports, names, strict=True):
        _ip("-n", tag, "link", "set", port, "netns", name, "name", "eth0")
        _ip("-n", name, "link", "set", "eth0", "mtu", str(MTU))


_made = itertools.count()


@contextlib.contextmanager
def machines(count: int, link: Link | None = None) -> Iterator[Machines]:
    """So many machines, until the block ends, with a network like this; skips the test where they cannot be made."""
    missing = [f"`{tool}`" for tool in ("ip", "unshare") if not shutil.which(tool)] + ["root"] * (os.geteuid() != 0)
    if missing:
        pytest.skip(f"emulated machines need {', '.join(missing)}")
    tag, net = f"gm{os.getpid()}-{next(_made)}", f"10.{100 + os.getpid() % 100}.7"
    names = [f"{tag}-{number}" for number in range(count)]
    with contextlib.ExitStack() as stack:
        # a short path, since those of Ray's sockets are limited to 107 characters
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gm-", ignore_cleanup_errors=True))
        for name in (tag, *names):
            stack.callback(_end, name)
        try:
            _ip("netns", "add", tag)
            for name in names:
                _ip("netns", "add", name)
            (_plug_into_bridge if link is None else functools.partial(_plug_into_slow_switch, link))(tag, names)
            for number, name in enumerate(names):
                _ip("-n", name, "addr", "add", f"{net}.{number + 1}/24", "dev", "eth0")
                for device in ("eth0", "lo"):
                    _ip("-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            why = error.stderr.decode().strip().rpartition("\n")[2]
            pytest.skip(f"emulated machines cannot be made here: {why}")
        yield Machines(names, [f"{net}.{number + 1}" for number in range(count)], Path(folder))


def _end(name: str) -> None:
    lose(name, cut=False)
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
