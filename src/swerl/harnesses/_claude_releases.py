"""Claude Code's releases: what npm holds of each, which bytes those are, and how each is started.

Up to 2.1.112 a release is plain JavaScript for Node. From then on it is one native program in a
package per platform, for glibc or for musl.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

from swerl.core.errors import InputError
from swerl.core.sandbox import Mount
from swerl.harnesses import _bundles

HOME = "/opt/swerl/agents/claude-code"
_NODE = "/opt/swerl/agents/node"
COMPACT_AT = "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"
"""Variable with the percentage of the window at which the CLI compacts; 2.0.14 knows none."""
_LAST_JAVASCRIPT = (2, 1, 112)
_PACKAGE = "@anthropic-ai/claude-code"
_PINNED = {
    f"{_PACKAGE}@2.1.112": "sha512-"
    "9FUgJ0EOvILyhIqxFKNVliebiUjL68dwpEW3eGSSe0vkVDJ1c5qMDNWc22gW3zkD7zRAqtfQPSGv0t4vMM2DPA==",
    f"{_PACKAGE}-linux-x64@2.1.143": "sha512-"
    "gnlVMesO1nHh8DDyZpbmBIkIUN3rdap5SVxccZ8GRey1ZG25BByyy9I0MA0trmPRtB1/6vRW7yM4Er2JjzdUHQ==",
    f"{_PACKAGE}-linux-x64@2.1.330": "sha512-"
    "9Gn+V7DtJ8M1nztP9CeDVl9g3RtrepI7rOFTyPRRnZe8D6zebIHKmC7OvBauucuAP0X0k85SDN/LPVZyjsGezQ==",
}
"""Known tarballs; other versions are checked against what npm states."""
_MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}


def is_native(version: str) -> bool:
    """Say whether a release needs no Node."""
    return tuple(map(int, version.split("."))) > _LAST_JAVASCRIPT


def fetch(version: str, libc: str) -> tuple[Mount, ...]:
    """Return the mounts of a release, downloading what is not in the cache yet.

    `libc` is that of the image: `glibc` or `musl`. Raises InputError where there is none.
    """
    if is_native(version):
        package = f"{_PACKAGE}-linux-{_machine()}{'-musl' if libc == 'musl' else ''}"
        pin = _PINNED.get(f"{package}@{version}")
        return (Mount(_bundles.fetch(package, version, integrity=pin), HOME),)
    if libc == "musl":
        raise InputError(
            f"Claude Code {version} runs on Node, which is not had for musl",
            hint="use a native release: version 2.1.143 or newer",
        )
    pin = _PINNED.get(f"{_PACKAGE}@{version}")
    bundle = _bundles.fetch(_PACKAGE, version, integrity=pin)
    return (Mount(bundle, HOME), Mount(_bundles.node(), _NODE))


def program(version: str) -> list[str]:
    """Return the command that starts a release in a sandbox."""
    return [f"{HOME}/claude"] if is_native(version) else [f"{_NODE}/bin/node", f"{HOME}/cli.js"]


def can_compact(version: str, bundle: Sequence[Mount]) -> bool:
    """Say whether a release can be told where to compact; every native one can."""
    return is_native(version) or COMPACT_AT.encode() in (bundle[0].source / "cli.js").read_bytes()


def check(version: str) -> list[str]:
    """Return a quick command that works exactly where the release's program can run."""
    return [program(version)[0], "--version"]


def _machine() -> str:
    machine = platform.machine().lower()
    if machine not in _MACHINES:
        raise InputError(
            f"Claude Code has no native release for {machine}",
            hint="use version 2.1.112, which needs only Node",
        )
    return _MACHINES[machine]
