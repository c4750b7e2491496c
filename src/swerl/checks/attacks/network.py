"""Probes of the network: what a sandbox could send out, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from swerl.checks.attacks import _routes
from swerl.checks.attacks._services import neighbour
from swerl.checks.attacks.finding import (
    CannotError,
    Finding,
    failed,
    judge,
    passed,
    refused,
    worked,
)
from swerl.checks.attacks.lab import Box, Lab
from swerl.checks.attacks.registry import probe
from swerl.core.errors import SandboxError

_METADATA = ("169.254.169.254", "100.100.100.200", "fd00:ec2::254")
_OUTSIDE = (("1.1.1.1", 443), ("8.8.8.8", 53))
_LOCAL_RESOLVERS = ("127.0.0.1", "127.0.0.11", "127.0.0.53")


@probe("Looks for a network interface that is up, beside loopback.")
async def interfaces(lab: Lab) -> Finding:
    try:
        links = await lab.box.attack("network.links")
    except CannotError:
        table = await lab.box.text("/proc/net/dev")
        names = [line.split(":")[0].strip() for line in table.splitlines()[2:]]
        links = {name: "ok: listed" for name in names if name != "lo"}
    return judge(worked(links), "loopback alone is up")


@probe("Reads the routes: does one lead out of the sandbox?")
async def routes(lab: Lab) -> Finding:
    found = await _routes_of(lab.box)
    if found:
        return failed("; ".join(f"a route to {route}" for route in found[:3]))
    if lab.ground.external:
        outcomes = await lab.box.attack("network.connect", list(_OUTSIDE))
        return judge(worked(outcomes), f"no route; outside addresses: {refused(outcomes)}")
    return passed("no route but loopback's")


@probe("Looks for a name server, and asks it where the question could not leave the machine.")
async def dns(lab: Lab) -> Finding:
    found = await _routes_of(lab.box)
    configured = await _resolvers(lab.box)
    holes = [
        f"resolver {server}, and a route to {route}"
        for server in configured
        if not server.startswith("127.") and (route := _routes.best(found, server))
    ]
    if found and not lab.ground.external:
        if not holes and configured:
            raise CannotError(f"{configured[0]} may ask on beyond this machine: --external asks it")
        return judge(holes, "no resolver is named, and none was asked")
    servers = list(dict.fromkeys((*configured, *_LOCAL_RESOLVERS)))
    outcomes = await lab.box.attack("network.ask_resolvers", servers)
    return judge(holes + worked(outcomes), f"no answer ({refused(outcomes)})")


@probe("Connects to another host, which the probe makes in a network namespace beside this one.")
async def other_hosts(lab: Lab) -> Finding:
    lab.need_shared_kernel()
    async with neighbour() as address:
        route = _routes.best(await _routes_of(lab.box), address)
        stays = route is None or route.network.prefixlen == 30
        if not stays and not lab.ground.external:
            return failed(f"a route to {address} leads out: {route}")
        outcomes = await lab.box.attack("network.connect", [(address, 7)])
        return judge(worked(outcomes), refused(outcomes))


@probe("Looks for a way to the cloud's metadata address, which hands out the machine's keys.")
async def cloud_metadata(lab: Lab) -> Finding:
    found = await _routes_of(lab.box)
    ways = {address: _routes.best(found, address) for address in _METADATA}
    holes = [f"{address} is routed: {route}" for address, route in ways.items() if route]
    if not lab.ground.external:
        return judge(holes, "no route leads to it")
    outcomes = await lab.box.attack("network.connect", [(address, 80) for address in _METADATA])
    return judge(worked(outcomes), refused(outcomes))


@probe("Makes raw and packet sockets, to see and forge what others send.")
async def raw_sockets(lab: Lab) -> Finding:
    holes, answers = await lab.as_users("network.raw_sockets")
    return judge(holes, answers)


@probe("Makes a socket to the hypervisor below the machine.")
async def hypervisor_socket(lab: Lab) -> Finding:
    holes, answers = await lab.as_users("network.vsock")
    return judge(holes, answers)


@probe("Sets an interface's flags, the first step to a network of its own making.")
async def network_settings(lab: Lab) -> Finding:
    holes, answers = await lab.as_users("network.configure")
    return judge(holes, answers)


async def _routes_of(box: Box) -> Sequence[_routes.Route]:
    tables = ["", ""]
    for number, name in enumerate(("route", "ipv6_route")):
        try:
            tables[number] = await box.text(f"/proc/net/{name}")
        except CannotError:
            if name == "route":
                raise  # a kernel without IPv6 has no table of it
    return _routes.parse(*tables)


async def _resolvers(box: Box) -> list[str]:
    with suppress(CannotError, SandboxError):
        lines = (await box.text("/etc/resolv.conf")).splitlines()
        words = [line.split() for line in lines]
        return [line[1] for line in words if len(line) > 1 and line[0] == "nameserver"]
    return []
