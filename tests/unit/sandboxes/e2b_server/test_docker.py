"""The server over containers: the same program, and what differs there."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from e2b import Sandbox

from swerl.sandboxes import docker

from .helpers import KEY, Service, eventually, serving
from .test_sdk_versions import FLOW, run_flow


@pytest.fixture(scope="module")
def containers(dockerd: str, docker_image: str) -> Iterator[Service]:
    """A server over a real dockerd."""
    backend = docker.build(docker.Options(base_url=dockerd))
    with serving(backend, templates={"base": docker_image}) as running:
        yield running


def test_the_flow_runs_over_containers(containers: Service) -> None:
    run_flow([sys.executable, str(FLOW), containers.url, KEY])


def test_files_and_folders_belong_to_whom_they_were_made_for(containers: Service) -> None:
    sandbox = Sandbox.create(**containers.sdk)
    sandbox.files.write("/opt/new/mine", "x")
    sandbox.files.make_dir("/opt/made/deep")
    sandbox.commands.run("echo more >> /opt/new/mine; touch /opt/made/deep/mine")
    sandbox.files.write("/etc/by-root", "x", user="root")
    assert sandbox.files.get_info("/etc/by-root").owner == "root"
    sandbox.files.remove("/etc/by-root")
    assert not sandbox.files.exists("/etc/by-root")
    sandbox.kill()


def test_a_daemon_outlives_the_command_that_started_it_there_too(containers: Service) -> None:
    sandbox = Sandbox.create(**containers.sdk)
    sandbox.commands.run("setsid sleep 77.9 >/dev/null 2>&1 </dev/null & echo started")
    count = "grep -lxz '[7]7.9' /proc/[0-9]*/cmdline 2>/dev/null | wc -l"
    assert sandbox.commands.run(count).stdout == "1\n"
    sandbox.kill()
    eventually(lambda: not sandbox.is_running())


def test_an_image_that_the_daemon_lacks_is_no_template(containers: Service) -> None:
    with pytest.raises(Exception, match="404"):
        Sandbox.create("no/such-image:1", **containers.sdk)
