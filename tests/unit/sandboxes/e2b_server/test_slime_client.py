"""A client as slime's recipes have it: image by metadata, files in, detached work, polling."""

from __future__ import annotations

from e2b import AsyncSandbox, CommandExitException

from .helpers import Service

LAUNCHER = """\
cd /home/user/repo
python3 -c 'print(6 * 7)' > out.log 2>&1
echo $? > /tmp/.run.done
"""


async def test_a_whole_episode_of_such_a_client(service: Service) -> None:
    metadata = {"image": "host", "route/size": "small"}
    sandbox = await AsyncSandbox.create(timeout=600, metadata=metadata, **service.sdk)
    run = sandbox.commands.run
    await run("mkdir -p /home/user/repo && cd /home/user/repo && git init -q . && touch f")
    await run("git config --system --get-all safe.directory || true", user="root")
    await sandbox.files.write("/tmp/.run.sh", LAUNCHER, user="root", use_octet_stream=True)
    await run("rm -rf /tmp/.run.done /tmp/.run.lock")
    spawn = "mkdir /tmp/.run.lock || exit 0; setsid bash /tmp/.run.sh >/dev/null 2>&1 </dev/null &"
    for _ in range(2):  # the second is a retry of the transport: it must not start again
        await run(spawn, timeout=30)
    code = ""
    for _ in range(200):
        try:
            code = (await run("test -f /tmp/.run.done && cat /tmp/.run.done")).stdout.strip()
        except CommandExitException as error:
            assert error.exit_code == 1
        if code:
            break
    assert code == "0"
    assert await sandbox.files.read("/home/user/repo/out.log") == "42\n"
    diff = await run("cd /home/user/repo && git add -N . && git diff --stat -- .")
    assert "out.log" in diff.stdout
    await sandbox.kill()
