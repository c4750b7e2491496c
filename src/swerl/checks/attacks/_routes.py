"""Routes of a network namespace, read and never tried."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network

_UP, _REJECT = 0x1, 0x200


@dataclass(frozen=True, slots=True)
class Route:
    """One way out."""

    interface: str
    network: IPv4Network | IPv6Network

    def __str__(self) -> str:
        return f"{self.network} by {self.interface}"


def parse(table4: str, table6: str) -> list[Route]:
    """Read /proc/net/route and /proc/net/ipv6_route; leave loopback and refusals out."""
    routes = []
    for line in table4.splitlines()[1:]:
        name, target, _, flags, _, _, _, mask = line.split()[:8]
        if _leads_out(name, int(flags, 16)):
            network = f"{_address4(target)}/{_address4(mask)}"
            routes.append(Route(name, ipaddress.ip_network(network, strict=False)))
    for line in table6.splitlines():
        words = line.split()
        if _leads_out(words[9], int(words[8], 16)):
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))
            network6 = f"{address}/{int(words[1], 16)}"
            routes.append(Route(words[9], ipaddress.ip_network(network6, strict=False)))
    return routes


def best(routes: Sequence[Route], address: str) -> Route | None:
    """Return the route that a packet to this address takes, None where there is none."""
    wanted = ipaddress.ip_address(address)
    fitting = [route for route in routes if wanted in route.network]
    return max(fitting, key=lambda route: route.network.prefixlen, default=None)


def _leads_out(interface: str, flags: int) -> bool:
    return interface != "lo" and bool(flags & _UP) and not flags & _REJECT


def _address4(text: str) -> str:
    return socket.inet_ntoa(struct.pack("=I", int(text, 16)))
