"""By which names the machine itself is asked, and how long a request may take to arrive."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

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
