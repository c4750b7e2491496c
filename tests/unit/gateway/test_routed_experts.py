"""The experts that an engine records reach the Sample at their own token and context.

The engine here chooses experts by the whole prefix, the weights and the call, so that a record that
slips by one position, one branch or one reply is another.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from swerl.core import experts
from swerl.core.chat import Message, Role
from swerl.core.contracts import EngineSetup
from swerl.core.experts import ExpertSpool
from swerl.core.sample import Sample, to_samples
from swerl.core.turn import Completion, RoutedExperts, Sampling, WeightChange
from swerl.engines import sglang
from swerl.engines.families import tiny as tokenizer
from swerl.gateway.limits import SessionLimits
from swerl.gateway.prompting import HistoryPolicy
from swerl.gateway.server import Gateway
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway._wire_engine import wired
from tests.unit.gateway.test_exact_tokens import live
from tests.unit.gateway.test_server import body, post

LAYERS, TOP_K, EXPERTS = 3, 2, 256


def experts_of(prefix: Sequence[int], noise: str) -> bytes:
    """Return the experts of the last position of a prefix."""
    told = array("i", prefix).tobytes() + noise.encode()
    return hashlib.blake2b(told, digest_size=LAYERS * TOP_K).digest()


@dataclass
class RoutingEngine(RecordingEngine):
    """Records experts, sometimes none; its weights may change during a reply."""

    random: Random = field(default_factory=lambda: Random(0))
    missing: float = 0.0
    """Share of replies without a record."""
    chosen: dict[tuple[int, ...], set[bytes]] = field(default_factory=dict)
    """Prefix -> experts that were recorded for its last token."""
    num_versions: int = 0

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        done = await super().generate(ids, sampling, session)
        whole = (*ids, *done.ids)
        change = None
        if len(done.ids) > 1 and self.random.random() < 0.3:
            self.num_versions += 1
            change = WeightChange(self.random.randrange(1, len(done.ids)), f"v{self.num_versions}")
            done = replace(done, weight_changes=(change,))
        if self.random.random() < self.missing:
            return done
        data = bytearray()
        for position in range(sampling.num_routed, len(whole) - 1):
            is_new = change and position >= len(ids) + change.at
            noise = f"{len(self.calls)} {change.version if change and is_new else ''}"
            found = experts_of(whole[: position + 1], noise)
            self.chosen.setdefault(whole[: position + 1], set()).add(found)
            data += found
        record = RoutedExperts(sampling.num_routed, LAYERS, TOP_K, 1, bytes(data))
        return replace(done, routed=record)


def by_position(sample: Sample) -> dict[int, bytes]:
    """Return the record of each position that has one."""
    size = LAYERS * TOP_K
    return {
        piece.start + n: bytes(data[n * size : (n + 1) * size])
        for piece, data in zip(sample.routed, experts.read(sample.routed), strict=True)
        for n in range(piece.num_positions)
    }


@given(seed=st.integers(0, 2**32), policy=st.sampled_from(HistoryPolicy))
@settings(max_examples=20, deadline=None)
def test_every_position_has_the_experts_recorded_for_its_token_in_its_context(
    seed: int, policy: HistoryPolicy
) -> None:
    engine = RoutingEngine(random=Random(seed))
    _, trajectory = asyncio.run(live(Random(seed), engine, policy))
    for sample in to_samples(trajectory, episode="e", task="t"):
        found = by_position(sample)
        assert sorted(found) == list(range(len(sample.ids) - 1))
        assert sample.num_routed == len(found)
        for position, recorded in found.items():
            assert recorded in engine.chosen[tuple(sample.ids[: position + 1])]


async def test_experts_of_an_engine_behind_a_url_are_spooled(tmp_path: Path) -> None:
    tokenizer.save_tokenizer(tokenizer.byte_tokenizer(), tmp_path)
    config = {"vocab_size": 512, "num_hidden_layers": LAYERS, "num_experts_per_tok": TOP_K}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts": EXPERTS}))
    engine = RoutingEngine()
    async with wired(engine) as wire:
        options = sglang.Options(url=wire.url, routed_experts=True)
        setup = EngineSetup(engine.family, tmp_path, tmp_path)
        spool = ExpertSpool(tmp_path / "spool")
        async with (
            sglang.open(options, setup) as client,
            Gateway(engine=client, family=engine.family, spool=spool) as gateway,
        ):
            session = gateway.open("s", sampling=Sampling(100), limits=SessionLimits())
            said: list[dict[str, str]] = []
            for line in ("One.", "Two."):
                engine.lines = [Message(Role.ASSISTANT, line)]
                said.append({"role": "user", "content": f"Say {line}"})
                status, reply = await post(session, json=body(*said))
                assert status == 200, reply
                said.append({"role": "assistant", "content": reply["content"][0]["text"]})
            trajectory = await session.close()
    [sample] = to_samples(trajectory, episode="e", task="t")
    assert {piece.data.file for piece in sample.routed} == {tmp_path / "spool" / "s.bin"}
    found = by_position(sample)
    assert sorted(found) == list(range(len(sample.ids) - 1))
    for position, recorded in found.items():
        assert recorded in engine.chosen[tuple(sample.ids[: position + 1])]
