"""Routes are read as the kernel writes them, and never tried."""

from __future__ import annotations

from tests.attacks import network as _routes

TABLE4 = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010011AC\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
lo\t0000007F\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0
eth0\t00000A0A\t00000000\t0201\t0\t0\t0\t0000FFFF\t0\t0\t0
"""
TABLE6 = (
    "fe800000000000000000000000000000 40 00000000000000000000000000000000 00 "
    "00000000000000000000000000000000 00000100 00000001 00000000 00000001     eth0\n"
    "00000000000000000000000000000000 00 00000000000000000000000000000000 00 "
    "00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo\n"
)


def test_loopback_and_refusals_are_no_way_out() -> None:
    found = [str(route) for route in _routes.parse(TABLE4, TABLE6)]
    assert found == ["0.0.0.0/0 by eth0", "172.17.0.0/16 by eth0", "fe80::/64 by eth0"]


def test_the_narrowest_route_is_the_one_taken() -> None:
    routes = _routes.parse(TABLE4, TABLE6)
    taken = {
        address: _routes.best(routes, address) for address in ("172.17.0.1", "169.254.169.254")
    }
    assert [str(route) for route in taken.values()] == [
        "172.17.0.0/16 by eth0", "0.0.0.0/0 by eth0",
    ]  # fmt: skip
    assert _routes.best(routes, "fd00:ec2::254") is None


def test_an_empty_table_leads_nowhere() -> None:
    assert _routes.parse(TABLE4.splitlines()[0], "") == []
