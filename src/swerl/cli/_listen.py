"""Who can reach an address that a command listens on."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Say whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
