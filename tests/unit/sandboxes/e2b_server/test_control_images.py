"""Which image a template id and metadata stand for."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from swerl.sandboxes.e2b_server.control import choose
from swerl.sandboxes.e2b_server.failure import Code, WireError
from swerl.sandboxes.e2b_server.served import ServerOptions

OPTIONS = ServerOptions(templates={"base": "host", "folder": "dir:/srv"}, image_key="img")


@pytest.mark.parametrize(
    ("template", "metadata", "image"),
    [
        ("base", {}, "host"),
        ("built:mine", {}, "built:mine"),
        ("host", {}, "host"),
        (quote("org/name:tag", safe=""), {}, "org/name:tag"),
        ("registry.example:5000/a/b@sha256:" + "0" * 64, {}, None),
        ("base", {"img": "org/task:1"}, "org/task:1"),
        ("base", {"image": "org/task:1"}, "host"),
        ("base", {"img": "folder"}, "dir:/srv"),
        ("folder", {}, "dir:/srv"),
    ],
)
def test_metadata_wins_then_the_operators_templates_then_the_id_itself(
    template: str, metadata: dict[str, str], image: str | None
) -> None:
    assert choose(template, metadata, OPTIONS) == (image or template)


@pytest.mark.parametrize(
    "reference",
    ["dir:/etc", "dir:etc", "/etc", "./x", "../x", "~/x", "oci:/x", "oci-archive:/x", "file:///x",
     "built:/etc", quote("dir:/etc", safe="")],
)  # fmt: skip
def test_no_client_names_a_folder_of_the_servers_machine(reference: str) -> None:
    for template, metadata in ((reference, {}), ("base", {"img": reference})):
        with pytest.raises(WireError) as refused:
            choose(template, metadata, OPTIONS)
        assert refused.value.code is Code.PERMISSION_DENIED
