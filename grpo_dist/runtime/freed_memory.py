"""What malloc keeps of freed memory, in processes whose passes over the model run on CPU.

By default glibc gives large freed blocks back to the kernel at once, and every pass pays a page fault for each 4 KiB of
them again: 8 % of the update time of SmolLM2-135M. So they are kept. But passes differ in their lengths, their blocks
differ in size, and what is kept falls to pieces: the same run grew from 4 to 11 GiB in 160 steps. So once much more is
kept than one pass needs, all of it goes back, and the next pass pays for its pages once.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

# Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# What is kept may be so many times what the first pass after the last return has left, and so many bytes more.
TIMES, SLACK = 1.25, 256 << 20
_PAGE = 4096


class _MallInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks top"  # of malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


class FreedMemory:
    """Keeps freed memory for the next pass, from when it is made. Does nothing without glibc 2.33 or later."""

    def __init__(self) -> None:
        self.num_returned = 0  # how often memory has gone back to the kernel
        self._usual: int | None = None
        self._info: Any = None
        try:
            self._libc = ctypes.CDLL(None)
            self._info = self._libc.mallinfo2
            mallopt = self._libc.mallopt
        except (OSError, AttributeError):
            self._info = None  # without mallopt too
            return
        self._info.restype = _MallInfo
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)

    def after_pass(self) -> None:
        """To be called after each pass of one kind: return what is kept if it is much more than such a pass leaves."""
        if self._info is None:
            return
        kept = kept_bytes(self._info())
        if self._usual is None:
            self._usual = kept
        elif kept > TIMES * self._usual + SLACK:
            self._libc.malloc_trim(0)
            self._usual, self.num_returned = None, self.num_returned + 1


def kept_bytes(info: _MallInfo) -> int:
    """Private memory of this process that is resident and not in use."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * _PAGE - info.uordblks - info.hblkhd
