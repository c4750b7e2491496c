"""Real daemons for tests: dockerd, a container registry, and an image for both.

Every test may ask for these session fixtures by name; tests/conftest.py makes them known:

    dockerd        base URL of a real dockerd, `unix:///…/docker.sock`
    registry       address of a real registry, `127.0.0.1:<port>`; plain HTTP, no login, may delete
    base_image     BaseImage: `.layout` is an OCI layout folder with the tag `1`, `.archive` a tar
                   for `docker load`, `.name` its name there
    docker_image   name of that image, loaded into `dockerd`
    pushed_image   reference of that image in `registry`, `127.0.0.1:<port>/swerl-test/base:1`

The image has two layers. It holds sh, bash, coreutils, grep, sed, tar, git, procps and Python with
its standard library, taken from this machine; its user is `agent` (1000), its home /home/agent,
its workdir the empty folder /testbed, which belongs to the agent.

A daemon is started by the first worker that asks and shared by all of the run's workers; it is
stopped when the last of them is gone, killed ones included. A fixture whose daemon cannot run here
skips with the reason. `dockerd.start` and `registry.start` also work without pytest.
"""
