"""How processes of one machine reach each other: by which names it is asked, and by which interface they meet."""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit

LOOPBACK_INTERFACE = "lo"
REQUEST_S = 60.0
"""Seconds in which a request must be whole; a connection that is slower, or silent, is closed."""


def is_this_machine(host: str) -> bool:
    """Return whether a request's Host header is one that this machine alone has.

    A web page that has turned a name of its own to the loopback address (DNS rebinding), and so can ask what listens
    there, sends that name. Nothing is what programs that are no browser may send.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return not host or name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:  # another name
        return False


def stay_on_loopback() -> None:
    """Make gloo listen on loopback, not on the address of the machine's name, unless the user names an interface."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
