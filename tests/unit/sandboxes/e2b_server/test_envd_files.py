"""Files through the SDK and through signed addresses."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from e2b import FileNotFoundException, InvalidArgumentException, Sandbox
from e2b.exceptions import SandboxException

from swerl.sandboxes import local

from .helpers import KEY, Service, serving


@pytest.mark.parametrize("size_mib", [0, 5, 100])
def test_files_come_back_as_they_were_sent(sandbox: Sandbox, size_mib: int) -> None:
    data = os.urandom(1 << 20) * size_mib
    info = sandbox.files.write("some/where/file.bin", data)
    assert (info.path, info.name) == ("/home/user/some/where/file.bin", "file.bin")
    assert bytes(sandbox.files.read("some/where/file.bin", format="bytes")) == data


def test_streams_gzip_and_many_files_at_once(sandbox: Sandbox) -> None:
    sandbox.files.write("streamed", io.BytesIO(b"bytes from a stream"))
    sandbox.files.write("packed", "text " * 1000, gzip=True)
    sandbox.files.write_files([{"path": "a/ö ü", "data": "1"}, {"path": "/tmp/b", "data": b"2"}])
    assert sandbox.files.read("streamed") == "bytes from a stream"
    assert sandbox.files.read("packed", gzip=True) == "text " * 1000
    assert (sandbox.files.read("a/ö ü"), sandbox.files.read("/tmp/b")) == ("1", "2")
    assert b"".join(sandbox.files.read("streamed", format="stream")) == b"bytes from a stream"


def test_what_cannot_be_read_or_written_is_said(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundException):
        sandbox.files.read("nothing")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.read("/tmp")
    with pytest.raises(SandboxException):
        sandbox.files.write("/tmp", "x")
    with pytest.raises(InvalidArgumentException, match="home"):
        sandbox.files.read("~other/file")


def test_root_has_a_home_of_its_own(sandbox: Sandbox) -> None:
    assert sandbox.files.write("f", "x", user="root").path == "/root/f"
    assert sandbox.files.write("~/f", "x").path == "/home/user/f"


def test_a_link_leads_nowhere_outside(sandbox: Sandbox, tmp_path_factory: object) -> None:
    sandbox.commands.run("ln -s / out; ln -s ../../../../../../../proc/1/root up")
    with pytest.raises(FileNotFoundException):
        sandbox.files.read(f"out{__file__}")
    with pytest.raises((FileNotFoundException, SandboxException)):
        sandbox.files.read(f"up{__file__}")


def test_a_signed_address_opens_one_file_one_way(sandbox: Sandbox) -> None:
    sandbox.files.write("offered", "take it")
    url = sandbox.download_url("offered", use_signature_expiration=60)
    assert httpx.get(url).text == "take it"
    assert httpx.post(url, files={"file": b"no"}).status_code == 401
    assert httpx.get(url.replace("offered", "other")).status_code == 401
    assert httpx.get(url.replace("signature_expiration=", "signature_expiration=9")).is_error
    late = sandbox.download_url("offered", use_signature_expiration=-5)
    assert httpx.get(late).status_code == 401


def test_a_signed_address_takes_an_upload(sandbox: Sandbox) -> None:
    url = sandbox.upload_url("given")
    assert httpx.post(url, files={"file": b"by a form"}).status_code == 200
    assert sandbox.files.read("given") == "by a form"


def test_curl_sends_a_large_file_without_waiting(sandbox: Sandbox, tmp_path: Path) -> None:
    """For a large form curl waits for `100 Continue`, up to a second."""
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    file = tmp_path / "file"
    file.write_bytes(os.urandom(3 << 20))
    argv = ["curl", "-sS", "-v", "-F", f"file=@{file}", sandbox.upload_url("big")]
    done = subprocess.run(argv, capture_output=True, timeout=30, check=True)
    assert b"100 Continue" in done.stderr
    assert bytes(sandbox.files.read("big", format="bytes")) == file.read_bytes()


def test_a_file_over_the_cap_is_refused_and_nothing_is_written(service: Service) -> None:
    with serving(local.build(local.Options()), max_file_mib=1) as small:
        sandbox = Sandbox.create(**small.sdk)
        for octets in (True, False):
            with pytest.raises(SandboxException, match="larger"):
                sandbox.files.write("big", b"\0" * (2 << 20), use_octet_stream=octets)
        with pytest.raises(SandboxException, match="larger"):
            sandbox.files.write("bomb", b"\0" * (64 << 20), gzip=True)
        assert sandbox.files.list("/home/user") == []
        sandbox.kill()


def test_a_form_that_is_none_is_refused(service: Service, sandbox: Sandbox) -> None:
    headers = {
        "X-Access-Token": sandbox._envd_access_token or "",
        "E2b-Sandbox-Id": sandbox.sandbox_id,
    }
    with service.client(**headers) as client:
        for kind in ("multipart/form-data", "multipart/form-data; boundary=x", "text/plain"):
            answer = client.post(
                "/files", params={"path": "f"}, content=b"junk", headers={"Content-Type": kind}
            )
            assert answer.status_code == 400, kind
        assert client.post("/files", files={"file": b"x"}).status_code in (200, 400)
    assert KEY not in repr(headers)
