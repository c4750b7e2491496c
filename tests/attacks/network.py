"""Attacks by the network: traffic that could leave the sandbox."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network

from swerl.core.errors import SandboxError
from tests.attacks._targets import neighbour
from tests.attacks.attack import (
    AttackContext,
    AttackFinding,
    CannotError,
    OpenSandbox,
    attack,
    failed,
    judge,
    passed,
    refused,
    worked,
)

_METADATA = ("169.254.169.254", "100.100.100.200", "fd00:ec2::254")
_OUTSIDE = (("1.1.1.1", 443), ("8.8.8.8", 53))
_LOCAL_RESOLVERS = ("127.0.0.1", "127.0.0.11", "127.0.0.53")


@attack("Looks for an active network interface other than loopback.")
async def interfaces(ctx: AttackContext) -> AttackFinding:
    try:
        links = await ctx.box.attack("network.links")
    except CannotError:
        table = await ctx.box.text("/proc/net/dev")
        names = [line.split(":")[0].strip() for line in table.splitlines()[2:]]
        links = {name: "ok: listed" for name in names if name != "lo"}
    return judge(worked(links), "only loopback is up")


@attack("Looks for a network route that leaves the sandbox.")
async def routes(ctx: AttackContext) -> AttackFinding:
    found = await _routes_of(ctx.box)
    if found:
        return failed("; ".join(f"a route to {route}" for route in found[:3]))
    if ctx.target.external:
        outcomes = await ctx.box.attack("network.connect", list(_OUTSIDE))
        return judge(worked(outcomes), f"no route; outside addresses: {refused(outcomes)}")
    return passed("only loopback is routed")


@attack("Looks for a name server, and queries it if the query cannot leave the machine.")
async def dns(ctx: AttackContext) -> AttackFinding:
    found = await _routes_of(ctx.box)
    configured = await _resolvers(ctx.box)
    holes = [
        f"resolver {server}, and a route to {route}"
        for server in configured
        if not server.startswith("127.") and (route := best(found, server))
    ]
    if found and not ctx.target.external:
        if not holes and configured:
            raise CannotError(
                f"{configured[0]} may forward queries off this machine: use --external to query it"
            )
        return judge(holes, "no resolver is configured, and none was queried")
    servers = list(dict.fromkeys((*configured, *_LOCAL_RESOLVERS)))
    outcomes = await ctx.box.attack("network.ask_resolvers", servers)
    return judge(holes + worked(outcomes), f"no answer ({refused(outcomes)})")


@attack("Connects to another host, which the attack creates in its own network namespace.")
async def other_hosts(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    async with neighbour() as address:
        route = best(await _routes_of(ctx.box), address)
        stays = route is None or route.network.prefixlen == 30
        if not stays and not ctx.target.external:
            return failed(f"a route to {address} leads out: {route}")
        outcomes = await ctx.box.attack("network.connect", [(address, 7)])
        return judge(worked(outcomes), refused(outcomes))


@attack("Looks for a route to the cloud's metadata address, which serves the machine's keys.")
async def cloud_metadata(ctx: AttackContext) -> AttackFinding:
    found = await _routes_of(ctx.box)
    ways = {address: best(found, address) for address in _METADATA}
    holes = [f"{address} is routed: {route}" for address, route in ways.items() if route]
    if not ctx.target.external:
        return judge(holes, "no route leads to it")
    outcomes = await ctx.box.attack("network.connect", [(address, 80) for address in _METADATA])
    return judge(worked(outcomes), refused(outcomes))


@attack("Opens raw and packet sockets, to read and forge the packets of others.")
async def raw_sockets(ctx: AttackContext) -> AttackFinding:
    return await ctx.judge_as_users("network.raw_sockets")


@attack("Opens a socket to the hypervisor of the machine.")
async def hypervisor_socket(ctx: AttackContext) -> AttackFinding:
    return await ctx.judge_as_users("network.vsock")


@attack("Sets an interface's flags, the first step to configure a network of its own.")
async def network_settings(ctx: AttackContext) -> AttackFinding:
    return await ctx.judge_as_users("network.configure")


async def _routes_of(box: OpenSandbox) -> Sequence[OpenRoute]:
    tables = ["", ""]
    for number, name in enumerate(("route", "ipv6_route")):
        try:
            tables[number] = await box.text(f"/proc/net/{name}")
        except CannotError:
            if name == "route":
                raise  # only the IPv6 table may be absent
    return parse(*tables)


async def _resolvers(box: OpenSandbox) -> list[str]:
    with suppress(CannotError, SandboxError):
        lines = (await box.text("/etc/resolv.conf")).splitlines()
        words = [line.split() for line in lines]
        return [line[1] for line in words if len(line) > 1 and line[0] == "nameserver"]
    return []


_UP, _REJECT = 0x1, 0x200


@dataclass(frozen=True, slots=True)
class OpenRoute:
    """A route that leaves the sandbox."""

    interface: str
    network: IPv4Network | IPv6Network

    def __str__(self) -> str:
        return f"{self.network} by {self.interface}"


def parse(table4: str, table6: str) -> list[OpenRoute]:
    """Parse /proc/net/route and /proc/net/ipv6_route, without loopback and reject routes."""
    routes = []
    for line in table4.splitlines()[1:]:
        name, target, _, flags, _, _, _, mask = line.split()[:8]
        if _leads_out(name, int(flags, 16)):
            network = f"{_address4(target)}/{_address4(mask)}"
            routes.append(OpenRoute(name, ipaddress.ip_network(network, strict=False)))
    for line in table6.splitlines():
        words = line.split()
        if _leads_out(words[9], int(words[8], 16)):
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))
            network6 = f"{address}/{int(words[1], 16)}"
            routes.append(OpenRoute(words[9], ipaddress.ip_network(network6, strict=False)))
    return routes


def best(routes: Sequence[OpenRoute], address: str) -> OpenRoute | None:
    """Return the route of a packet to this address; None without one."""
    wanted = ipaddress.ip_address(address)
    fitting = [route for route in routes if wanted in route.network]
    return max(fitting, key=lambda route: route.network.prefixlen, default=None)


def _leads_out(interface: str, flags: int) -> bool:
    return interface != "lo" and bool(flags & _UP) and not flags & _REJECT


def _address4(text: str) -> str:
    return socket.inet_ntoa(struct.pack("=I", int(text, 16)))
