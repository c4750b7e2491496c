"""Image names are read as Docker reads them."""

from __future__ import annotations

import pytest

from swerl.core.errors import InputError
from swerl.core.image_reference import Reference, base_url, is_local, parse, parse_target

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ubuntu", Reference("docker.io", "library/ubuntu")),
        ("swedev/scaleswe.oh.34:task1", Reference("docker.io", "swedev/scaleswe.oh.34", "task1")),
        ("index.docker.io/a/b:1", Reference("docker.io", "a/b", "1")),
        ("ghcr.io/a/b/c", Reference("ghcr.io", "a/b/c")),
        ("localhost/a:1", Reference("localhost", "a", "1")),
        ("127.0.0.1:5000/a:1", Reference("127.0.0.1:5000", "a", "1")),
        (f"a/b:1@{DIGEST}", Reference("docker.io", "a/b", "1", DIGEST)),
    ],
)
def test_name_is_split_into_its_parts(text: str, wanted: Reference) -> None:
    assert parse(text) == wanted
    assert parse(str(wanted)).version == wanted.version


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A/b",
        "a//b",
        "a/b:",
        "a/b@sha256:12",
        "a/../b",
        "a/b:1/../c",
        "a?b",
        "a.b:0/c",
        "a.b:65536/c",
    ],
)
def test_name_that_no_registry_takes_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not an image name"):
        parse(text)


@pytest.mark.parametrize("text", ["", "prefix", "https://host:1/a", "host:1/A", "host:1/a b"])
def test_target_that_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not a registry with an optional prefix"):
        parse_target(text)


@pytest.mark.parametrize(
    ("registry", "scheme"),
    [
        ("127.0.0.1:5000", "http"),
        ("localhost:5000", "http"),
        ("[::1]:5000", "http"),
        ("10.0.0.1:5000", "https"),
        ("ghcr.io", "https"),
        ("docker.io", "https"),
    ],
)
def test_only_loopback_is_spoken_to_in_plain_http(registry: str, scheme: str) -> None:
    assert base_url(registry).startswith(f"{scheme}://")


def test_mirror_keeps_repository_and_tag_below_its_prefix() -> None:
    target = parse_target("127.0.0.1:5000/swe/mirror/")
    assert str(target.place(parse("ghcr.io/a/b:1"))) == "127.0.0.1:5000/swe/mirror/a/b:1"


def test_local_images_are_known_by_their_names() -> None:
    assert all(is_local(name) for name in ("host", "built:x", "dir:/x"))
    assert not any(is_local(name) for name in ("host/a", "ubuntu"))
