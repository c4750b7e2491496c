"""Addresses and ports of the machine that this runs on."""

from __future__ import annotations

import socket


def interface_of(address: str) -> str:
    """Return the network interface that holds an address; `lo` where none does."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    return "lo"


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def address_towards(host: str) -> str:
    """Return this machine's IPv4 address on the route to a host. Raises OSError on an unknown one.

    IPv4 alone, as are the ports of `free_port`: a name may have an address of either kind.
    """
    found = socket.getaddrinfo(host, 9, family=socket.AF_INET, type=socket.SOCK_DGRAM)
    family, _, _, _, target = found[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
