"""How SGLang is found, launched and connected to; its answers are tested in test_contract.py."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.contracts import EngineSetup
from swerl.core.errors import EngineError
from swerl.engines import sglang
from tests.unit.engines._fake_sglang import FakeServer


def setup(log_dir: Path, model: Path | None) -> EngineSetup:
    return EngineSetup(family=None, log_dir=log_dir, model=model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("release", "hint"), [("0.5.2", "[sglang]"), ("0.5.23.post1", ""), ("0.6.0", "")]
)
async def test_the_release_of_a_server_is_compared_with_the_tested_ones(
    release: str, hint: str, servers: list[FakeServer], tmp_path: Path
) -> None:
    servers[0].release, notices = release, list[str]()
    own = replace(setup(tmp_path, None), notify=notices.append)
    opened = sglang.open(sglang.Options(url=servers[0].url), own)
    if hint:
        with pytest.raises(EngineError, match=f"{release}; tested: {sglang.TESTED}") as caught:
            await opened.__aenter__()
        assert hint in caught.value.hint
        return
    async with opened:
        assert [sglang.TESTED in notice for notice in notices] == [True] * (release == "0.6.0")


async def test_a_launch_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="needs a model"):
        async with sglang.open(sglang.Options(), setup(tmp_path, None)):
            pass


@pytest.mark.parametrize("python", [sys.executable, "/no/such/python"])
async def test_an_interpreter_without_sglang_is_one_error_with_a_hint(
    tmp_path: Path, tiny_model: Path, python: str
) -> None:
    options = sglang.Options(python=Path(python))
    with pytest.raises(EngineError, match="has no SGLang") as caught:
        async with sglang.open(options, setup(tmp_path, tiny_model)):
            pass
    assert "engine.python" in caught.value.hint
