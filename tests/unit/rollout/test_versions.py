from __future__ import annotations

from swerl.core.turn import Turn, WeightChange
from swerl.rollout.versions import Staleness, Versions, staleness
from tests.unit import made


def turn(num_tokens: int, version: str, *changes: WeightChange) -> Turn:
    return made.turn(output=range(num_tokens), version=version, weight_changes=changes)


def test_every_token_has_the_version_that_sampled_it() -> None:
    partial = turn(10, "a", WeightChange(4, "b"), WeightChange(9, "c"))
    assert list(partial.spans()) == [("a", 4), ("b", 5), ("c", 1)]
    unseen = turn(4, "a", WeightChange(0, "b"), WeightChange(4, "c"))
    assert list(unseen.spans()) == [("b", 4)]


def test_staleness_counts_versions_and_weighs_by_tokens() -> None:
    versions = Versions(["a", "b", "c"])
    partial = turn(10, "a", WeightChange(5, "c"))
    found = staleness([made.episode("e", partial, turn(10, "b"))], versions)
    assert found == Staleness(mean=1.0, largest=2, num_tokens=20, num_stale=15, num_partial=1)


def test_a_version_that_comes_again_is_not_newer() -> None:
    versions = Versions(["a"])
    versions.add("a")
    assert (versions.newest, versions.names) == (0, ("a",))
