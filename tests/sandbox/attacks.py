"""`python attacks.py ORPHANS`: hostile programs in sandboxes of this user; what became of each, as JSON."""

import json
import os
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from grpo_dist.errors import SandboxError
from grpo_dist.sandbox import Outcome, Sandbox, SandboxSettings, open_sandbox

SMALL = SandboxSettings(memory_mib=256, processes=20, cpu_s=2, output_mib=1, disk_mib=32)
LARGE = SandboxSettings(processes=30_000, cpu_s=600)  # the reaping of processes may lag behind
LONG = 300.0  # seconds that no program should need
MARK = f"mark-{uuid.uuid4().hex}"  # in the command line of programs that may be left

FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
GROWS = "held = []\nwhile True:\n    held.append(b'x' * 10**6)"
TEN_GIB = "bytearray(10 * 2**30)"
SHARED = """
import mmap
memory = mmap.mmap(-1, 10 * 2**30)
while True:
    memory.write(b"x" * 2**20)
"""
MEMORY_FILES = """
import os
held = []
while True:
    held.append(os.memfd_create("held"))
    for _ in range(20):
        os.write(held[-1], b"x" * 2**20)
"""
MANY = """
import os, time
for _ in range(15):
    if os.fork() == 0:
        held = b"x" * (100 * 2**20)
        time.sleep(1000)
time.sleep(1000)
"""
SHARES = """
import os
held = b"x" * (100 * 2**20)
children = [os.fork() for _ in range(4)]
if all(children):
    print("shared", [os.waitpid(child, 0)[1] for child in children])
else:
    held[::4096]
"""
UNREAPED = """
import os, time
try:
    while os.fork():
        pass
    os._exit(0)
except OSError:
    time.sleep(1000)
"""
ORPHANS = "i=0; while [ $i -lt $1 ]; do (true &); i=$((i+1)); done; echo done"
DAEMON = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for stream in range(3):
            os.close(stream)
        time.sleep(1000)
    os._exit(0)
print("gone", "{MARK}")
"""
CONNECT = """
import json, socket, sys
port, name = json.loads(sys.stdin.read())
addresses = (socket.AF_INET, ("127.0.0.1", port)), (socket.AF_UNIX, "\\0" + name), (socket.AF_INET, ("192.0.2.1", 80))
for family, address in addresses:
    try:
        socket.socket(family).connect(address)
        print("connected", address)
    except OSError as error:
        print(type(error).__name__)
print(sorted(name for _, name in socket.if_nameindex()))
"""
WRITE = """
for path in ("/x", "/usr/x", "/etc/x", "/dev/x", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", *PLACES):
    try:
        open(path, "w").write("x")
        print("written", path)
    except OSError:
        pass
"""
READ = """
import os
print(sorted(os.environ), os.getuid(), os.getcwd())
for path in ("/etc/passwd", "/etc/shadow", "/proc/1/environ", "/home", "/sys", *PLACES):
    try:
        print("read", path, os.listdir(path) if os.path.isdir(path) else open(path, "rb").read())
    except OSError:
        pass
print([pid for pid in os.listdir("/proc") if pid.isdecimal() and int(pid) > 9])
"""
SIGNAL = """
import os
for pid in (PID, -1):
    try:
        os.kill(pid, 9)
    except OSError as error:
        print(type(error).__name__)
"""
ENTER = "import ctypes; print([ctypes.CDLL(None).unshare(flag) for flag in (0x10000000, 0x20000)])"
FILE = "import os\nos.truncate(os.open('sparse', os.O_CREAT | os.O_RDWR), 10 * 2**30)"
FILES = """
import os
for number in range(10_000):
    with open(f"FOLDER/{number}", "wb", buffering=0) as file:
        for _ in range(8):
            if file.write(b"x" * 2**20) < 2**20:
                raise SystemExit(1)
"""


def python(sandbox: Sandbox, program: str, stdin: bytes = b"", timeout: float = LONG) -> Outcome:
    return sandbox.exec(["python3", "-c", program], stdin=stdin, timeout=timeout)


def one_by_one() -> dict[str, Outcome]:
    """Programs that exceed a limit, or stay below it."""
    programs = {"fork bomb": FORK_BOMB, "grows": GROWS, "ten GiB": TEN_GIB, "shared": SHARED, "many": MANY}
    programs |= {"memory files": MEMORY_FILES, "unreaped": UNREAPED, "busy": "while True: pass", "file": FILE}
    programs |= {"print": "while True: print('x' * 1000)", "error": "raise SystemExit(7)", "shares": SHARES}
    programs |= {"files": FILES.replace("FOLDER", "."), "files in /tmp": FILES.replace("FOLDER", "/tmp")}
    outcomes = {}
    for name, program in programs.items():
        with open_sandbox(SMALL) as sandbox:
            outcomes[name] = python(sandbox, program)
    with open_sandbox(SMALL) as sandbox:
        outcomes["hangs"] = python(sandbox, "import time; time.sleep(1000)", timeout=0.5)
        outcomes["next"] = python(sandbox, "print('here')")
        slowly = "import sys, time; time.sleep(0.3); print(len(sys.stdin.read()))"
        outcomes["reads slowly"] = python(sandbox, slowly, stdin=b"x" * 10**6)
        outcomes["reads nothing"] = python(sandbox, "print('here')", stdin=b"x" * 10**6)
    with open_sandbox(LARGE) as sandbox:
        outcomes["orphans"] = sandbox.exec(["sh", "-c", ORPHANS, "sh", sys.argv[1]], timeout=LONG)
    return outcomes


def looks_around() -> dict[str, Outcome]:
    """Programs that try to reach what is outside; a file and two servers of this user are there."""
    with tempfile.TemporaryDirectory() as outside, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        secret = Path(outside, "secret")
        secret.write_text("secret")
        tcp.bind(("127.0.0.1", 0))
        unix.bind(f"\0{MARK}")
        tcp.listen()
        unix.listen()
        os.environ["SECRET"] = "secret"
        places = f"PLACES = {[str(secret), str(Path.home() / 'x'), __file__]!r}"
        with open_sandbox() as sandbox:
            return {
                "connect": python(sandbox, CONNECT, stdin=json.dumps([tcp.getsockname()[1], MARK]).encode()),
                "write": python(sandbox, places + WRITE),
                "kept": Outcome(0, secret.read_bytes(), b"", ""),
                "read": python(sandbox, places + READ),
                "signal": python(sandbox, SIGNAL.replace("PID", str(os.getpid()))),
                "enter": python(sandbox, ENTER),
            }


def daemon() -> dict[str, Any]:
    """Whether a daemon outlives its program, or a program its sandbox."""
    told: dict[str, Any] = {}
    with open_sandbox() as sandbox, ThreadPoolExecutor(1) as pool:
        told["daemon"] = python(sandbox, DAEMON).stdout.split()[0].decode()
        told["left by a daemon"] = marked()
        ended = pool.submit(refusal, lambda: python(sandbox, f"{SLEEPS} # {MARK}"))
        while not marked():
            pass
        sandbox.close()
        told["closed"] = ended.result()  # then what has entered the sandbox for the program has ended too
        told["left by close"] = marked()
    told["again"] = [
        refusal(lambda: sandbox.exec(["true"])),
        refusal(lambda: sandbox.put({"x": "x"})),
        refusal(sandbox.close),
    ]
    return told


SLEEPS = "import time; time.sleep(1000)"


def closings() -> list[str]:
    """What is said of programs whose sandbox is closed at any moment of their start."""
    said: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        for milliseconds in range(30):
            with open_sandbox() as sandbox:
                runs = pool.submit(refusal, partial(python, sandbox, SLEEPS))
                time.sleep(milliseconds / 1000)
            said.append(runs.result())
    return said


def links() -> dict[str, Any]:
    """A program's symbolic links, and paths that lead out, when files are put and the folder is removed."""
    with tempfile.TemporaryDirectory() as outside:
        Path(outside, "kept").write_text("kept")
        with open_sandbox() as sandbox:
            sandbox.put({"a/b/c.txt": "text", "bytes": b"\0", "./bytes2": b"2"})
            shell = f"ln -s {outside} link; ln -s {outside}/kept file; cat a/b/c.txt"
            made = sandbox.exec(["sh", "-c", shell], timeout=LONG)
            sandbox.put({"a/b/c.txt": "other"})
            names = ("link/x", "link", "file", "../x", "a/../../x", "/x", "", ".", "a", "a/b/c.txt/d", "\0")
            refused = {name: refusal(partial(sandbox.put, {name: "x"})) for name in names}
            refused["room"] = refusal(lambda: sandbox.put({"large": b"x" * (300 << 20)}))
            listed = sandbox.exec(["cat", "a/b/c.txt"], timeout=LONG)
        kept = {path.name: path.read_text() for path in Path(outside).iterdir()}
    return {"refused": refused, "kept": kept, "made": made.stdout.decode(), "replaced": listed.stdout.decode()}


def side_by_side() -> list[str]:
    """What programs in 16 sandboxes say, each of its own."""

    def one(number: int) -> str:
        with open_sandbox() as sandbox:
            sandbox.put({"number": str(number)})
            command = ["sh", "-c", "cat number; ls | wc -l"]
            return "".join(sandbox.exec(command, timeout=LONG).stdout.decode() for _ in range(3))

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(one, range(16)))


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except SandboxError as error:
        return str(error)
    return ""


def marked() -> list[int]:
    """Other processes whose command line has the mark."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            has_it = MARK.encode() in Path("/proc", pid, "cmdline").read_bytes()
        except OSError:
            continue
        if has_it and int(pid) != os.getpid():
            found.append(int(pid))
    return found


def main() -> None:
    before = len(os.listdir("/proc/self/fd"))
    outcomes: Mapping[str, Outcome] = one_by_one() | looks_around()
    told = {name: [code, out.decode(), err.decode(), by] for name, (code, out, err, by) in outcomes.items()}
    result: dict[str, Any] = {"programs": told, "daemon": daemon(), "links": links(), "side by side": side_by_side()}
    result["closings"] = closings()
    result["left open"] = len(os.listdir("/proc/self/fd")) - before
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
