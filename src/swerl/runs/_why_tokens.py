"""Rules of `why.py` about tokens: prompts, replies, trained rows, recorded experts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise, takewhile
from typing import TYPE_CHECKING

from swerl.core import experts
from swerl.core.sample import Sample
from swerl.runs.evidence import Evidence, SeenStep, SeenTurn, Symptom

if TYPE_CHECKING:
    import numpy as np


_CALL = re.compile(
    r"<tool_call>.*?</tool_call>|<invoke .*?</invoke>|\[TOOL_CALLS\]|<\|python_tag\|>", re.DOTALL
)
"""A whole tool call in the markup of any family."""
_END = re.compile(
    r"<\|(?:im_end|endoftext|eot_id|eom_id|end_of_text|user|observation)\|>|</s>|<end_of_turn>"
)
"""A token that ends a turn in some family."""
_SHARED_TOKENS = 8
"""Tokens that prompts of different Tasks hardly share by chance."""
_MARKUP = re.compile(r"<\|[a-z_]+\|>|\[/?INST\]|<(?:start|end)_of_turn>|\[gMASK\]")
"""Markup of the chat templates of several families, each one token there."""
_THOUGHT = "</think>"
_MISMATCH = 0.05
"""Nats a token; bf16 kernels and quantised engines stay below."""
_CHANCE = -12.0
"""Logarithm of the probability that chance makes the attempts of a step equal: 6 in a million."""
_MISMATCH_OF_SAMPLING = 0.02
"""Nats a token by which the temperature changes even a sure policy's probabilities."""
_LEAST_TEMPERATURE = 0.2
"""Lower settings leave little to sample."""
_GREEDY_LOGP = -2.0
"""The likeliest of all tokens is hardly ever less likely; sampling draws such tokens often."""
_TURNS = 256
"""Turns of a step whose text a rule reads."""


def unread_calls(run: Evidence) -> Symptom | None:
    """Find replies with a whole tool call that the client never received as one."""
    for step in run.steps:
        called = [
            turn
            for turn in _some(step)
            if len(turn.output_ids) and _CALL.search(run.text(turn.output_ids))
        ]
        # The family's own parser tells a call from a mistake of the model.
        readable = [turn for turn in called if _is_readable(run, turn)]
        called = readable or called
        lost = [t for t in called if t.finish != "tool_calls" or (readable and t.malformed_calls)]
        if len(called) >= 5 and len(lost) > 0.5 * len(called):
            ends = Counter(turn.finish for turn in lost).most_common(1)[0][0]
            how = "counted as malformed" if ends == "tool_calls" else f"ended as {ends!r}"
            told = f"{len(lost)} of {len(called)} replies with a whole call were {how}"
            return Symptom(step.number, (told, step.told("turns_per_episode")))
    return None


def _is_readable(run: Evidence, turn: SeenTurn) -> bool:
    parsed = run.family.parse(list(turn.output_ids)) if run.family else None
    return parsed is not None and bool(parsed.calls) and not parsed.malformed_calls


def past_the_end(run: Evidence) -> Symptom | None:
    """Find replies that continue after a token that ends a turn."""
    for step in run.steps:
        turns = [turn for turn in _some(step) if len(turn.output_ids) > 1]
        past = [mark for turn in turns if (mark := _end_within(run, turn.output_ids[:-1]))]
        if len(past) >= 5 and len(past) > 0.2 * len(turns):
            cut = sum(turn.finish == "length" for turn in turns)
            told = f"{len(past)} of {len(turns)} replies continue after {past[0]}"
            return Symptom(step.number, (told, f"{cut} replies ended at a token limit"))
    return None


def turned_advantages(run: Evidence) -> Symptom | None:
    """Find better Episodes of a Group with a lower advantage than worse ones."""
    for step in run.steps:
        rewards = {each.id: each.reward for each in step.learnable}
        given = {sample.episode: sample.advantage for sample in step.samples}
        groups = [
            {each.id: given[each.id] for each in group if each.id in given}
            for group in step.groups.values()
        ]
        pairs = [
            (rewards[a] - rewards[b]) * (group[a] - group[b])
            for group in groups
            for a, b in combinations(group, 2)
            if rewards[a] != rewards[b]
        ]
        wrong = sum(value < 0 for value in pairs)
        if len(pairs) >= 3 and wrong > 0.5 * len(pairs):
            told = (
                f"in {wrong} of {len(pairs)} pairs of a Group, the higher reward has the lower "
                f"advantage: {run.root / 'samples'}"
            )
            return Symptom(step.number, (told,))
    return None


def foreign_experts(run: Evidence) -> Symptom | None:
    """Find recorded experts that do not fit their tokens, while engine and trainer differ."""
    for step in run.steps:
        mismatch = step.metrics.get("mismatch", 0.0)
        if mismatch < 0.01:
            continue
        same, any_two, count = _expert_agreement(step)
        if count >= 100 and same - any_two < 0.1 * (1 - any_two):
            told = (
                f"two places with one token share {same:.0%} of their experts in the first layer, "
                f"any two places {any_two:.0%}"
            )
            return Symptom(step.number, (told, f"mismatch {mismatch:.2g} nats a token"))
    return None


def changed_prompts(run: Evidence) -> Symptom | None:
    """Find a step whose tools, or the beginnings of all its prompts, are not those before it."""
    for old, new in pairwise(run.steps):
        before, after = (Counter(e.tools for e in step.episodes if e.tools) for step in (old, new))
        # Each of several agents has tools of its own, in every step.
        if min(before.total(), after.total()) >= 4 and not before.keys() & after.keys():
            told = (
                f"the tools' digest is {after.most_common(1)[0][0]} in step {new.number}, "
                f"{before.most_common(1)[0][0]} in step {old.number}"
            )
            return Symptom(new.number, (told,))
    before_roots: tuple[int, list[tuple[int, ...]]] | None = None
    for step in run.steps:
        roots = list({each.task: each.root for each in step.episodes if each.root}.values())
        if len(roots) < 4:
            continue
        if before_roots:
            number, others = before_roots
            place = _first_difference(others, roots)
            if place is not None:
                was, now = (run.text(each[0][place : place + 12]) for each in (others, roots))
                told = (
                    f"from token {place} on, all first prompts have {now!r} in step "
                    f"{step.number}, {was!r} in step {number}"
                )
                return Symptom(step.number, (told,))
        before_roots = (step.number, roots)
    return None


def stripped_thinking(run: Evidence) -> Symptom | None:
    """Find Episodes whose replayed history lacks the thinking that was sampled."""
    if run.key("gateway.history") == "template":
        return None  # The recipe asks for it.
    for step in run.steps:
        longer = [each for each in step.episodes if len(each.turns) > 1]
        thoughtful = [each for each in longer if _THOUGHT in run.text(each.turns[0].output_ids)]
        # A root that begins with the first prompt is the same conversation again.
        repeated = [
            turn
            for each in thoughtful
            for turn in each.turns[1:]
            if turn.parent is None
            and tuple(turn.prompt_ids[: len(each.root)]) == each.root
            and _THOUGHT not in run.text(turn.prompt_ids)
        ]
        if len(repeated) >= 3 and len(repeated) > 0.3 * len(thoughtful):
            told = (
                f"in {len(thoughtful)} Episodes with thinking, {len(repeated)} prompts repeat the "
                f"conversation without it"
            )
            rows = f"{len(step.samples)} rows of {len(step.episodes)} Episodes"
            return Symptom(step.number, (told, rows))
    return None


def shifted_mask(run: Evidence) -> Symptom | None:
    """Find trained rows whose mask does not cover exactly the sampled tokens."""
    for step in run.steps:
        turns = {each.id: each.sampled for each in step.episodes if each.turns}
        wrong = [row.episode for row in step.samples if not _is_exact(row, turns.get(row.episode))]
        if len(wrong) > 0.02 * len(step.samples):
            told = (
                f"{len(wrong)} of {len(step.samples)} rows train other tokens than the sampled "
                f"ones, such as that of {wrong[0]}: {run.root / 'samples'}"
            )
            return Symptom(step.number, (told,))
    return None


def _is_exact(row: Sample, turns: Sequence[SeenTurn] | None) -> bool:
    """Return whether a row trains what was sampled, as far as it shows."""
    import numpy as np

    is_trained, logp = np.asarray(row.mask) > 0, np.asarray(row.logprobs)
    # Context has no log-probability.
    if (logp[~is_trained] != 0).any():
        return False
    # An Episode of one row trains all of its Turns, in their order.
    if turns is None or row.share < 1:
        return True
    sampled = [token for turn in turns for token in turn.output_ids]
    return bool(np.array_equal(np.asarray(row.ids)[is_trained], sampled))


def stale_engine(run: Evidence) -> Symptom | None:
    """Find a step of which some replies come from other weights than the rest."""
    is_sync = run.key("schedule.mode", "sync") == "sync"
    for step in run.steps:
        versions = Counter(turn.weight_version for each in step.episodes for turn in each.sampled)
        others = sum(versions.values()) - max(versions.values(), default=0)
        if is_sync and others > 0.1 * sum(versions.values()):
            told = ", ".join(f"{count} replies by {name}" for name, count in versions.most_common())
            return Symptom(
                step.number, (f"weights in one step: {told}", step.told("staleness_max"))
            )
        mismatch = step.metrics.get("mismatch", 0.0)
        if step.metrics.get("mismatch_spread", 0.0) > 0.8 and mismatch > 1e-5:
            told = "engine and trainer agree on some rows and not on others"
            figures = f"{step.told('mismatch')}, {step.told('mismatch_spread')} decades"
            return Symptom(step.number, (f"{told}: {figures}",))
    return None


def any_mismatch(run: Evidence) -> Symptom | None:
    """Find an engine and a trainer that disagree everywhere."""
    for step, value in run.series("mismatch"):
        if value > _MISMATCH:
            most = dict(run.series("mismatch_max")).get(step, 0.0)
            return Symptom(step, (f"mismatch {value:.2g} nats a token, at most {most:.2g}",))
    return None


def foreign_template(run: Evidence) -> Symptom | None:
    """Find prompts with markup that is no token of the model."""
    for step in run.steps:
        roots = {each.task: each.root for each in step.episodes if each.root}
        found: Counter[str] = Counter()
        for root in list(roots.values())[:_TURNS]:
            marks = set(_MARKUP.findall(run.text(root)))
            found.update(marks - {run.text([token]).strip() for token in set(root)})
        if found and (best := found.most_common(1)[0])[1] > 0.5 * len(roots):
            told = f"{best[1]} of {len(roots)} first prompts spell {best[0]!r} in several tokens"
            return Symptom(step.number, (told, step.told("entropy")))
    return None


def greedy_sampling(run: Evidence) -> Symptom | None:
    """Find equal attempts without an unlikely token from the first step on.

    A policy that has collapsed looks the same, but only after some steps. An engine with a low
    temperature reports probabilities near 1, which the trainer does not confirm.
    """
    for step in run.steps[:1]:
        is_off = step.metrics.get("mismatch", 0.0) > _MISMATCH_OF_SAMPLING
        is_off |= run.key("rollout.temperature", 1.0) < _LEAST_TEMPERATURE
        least = _least_logp(step)
        if (equal := _equal_attempts(step, is_sure=is_off)) and least > _GREEDY_LOGP:
            figures = f"the least likely token has {least:.2g} nats, {step.told('mismatch')}"
            return Symptom(step.number, (equal, figures))
    return None


def repeated_attempts(run: Evidence) -> Symptom | None:
    """Find equal attempts with unlikely tokens, which independent draws would not repeat."""
    for step in run.steps:
        if (equal := _equal_attempts(step)) and (least := _least_logp(step)) <= _GREEDY_LOGP:
            rare = f"with tokens as unlikely as {least:.2g} nats"
            return Symptom(step.number, (f"{equal}, {rare}", step.told("groups_with_signal")))
    return None


def _least_logp(step: SeenStep) -> float:
    """Return the log-probability of the least likely sampled token."""
    return min((min(turn.logprobs, default=0.0) for turn in _some(step)), default=0.0)


def _equal_attempts(step: SeenStep, *, is_sure: bool = False) -> str:
    """Return in words how many Groups have attempts with the same tokens.

    Empty for few and, unless `is_sure`, if chance may have made them equal. Log-probabilities that
    are all exactly 0 are those of an engine that reports greedy choices so.
    """
    groups, equal, chance, logps = 0, 0, 0.0, 0.0
    for episodes in step.groups.values():
        said = [tuple(tuple(turn.output_ids) for turn in e.sampled) for e in episodes if e.turns]
        if len(said) > 1:
            groups += 1
            total = sum(sum(turn.logprobs) for e in episodes[:1] for turn in e.sampled)
            logps += total
            if len(set(said)) == 1:
                equal += 1
                chance += total * (len(said) - 1)
    by_chance = _CHANCE < chance < 0 or (not chance and logps)
    if equal < 3 or equal <= 0.8 * groups or (by_chance and not is_sure):
        return ""
    return f"in {equal} of {groups} Groups all attempts have the same tokens"


def _some(step: SeenStep) -> list[SeenTurn]:
    """Return sampled Turns of a step, spread over its Episodes."""
    turns = [turn for each in step.episodes for turn in each.sampled]
    return turns[:: max(1, len(turns) // _TURNS)]


def _end_within(run: Evidence, ids: Sequence[int]) -> str:
    """Return the first end of a turn among these ids, empty if there is none.

    Text of a file may spell an end of turn, too, but in several tokens.
    """
    marks = set(_END.findall(run.text(ids)))
    return next((name for token in ids if marks and (name := run.text([token])) in marks), "")


def _first_difference(old: Sequence[Sequence[int]], new: Sequence[Sequence[int]]) -> int | None:
    """Return the first place at which all old rows have one token and all new ones another.

    None if that may be chance: one side must go on alike for some tokens, as a system prompt does.
    """
    before, after = _common(old), _common(new)
    place = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None)
    if place is None or max(len(before), len(after)) < place + _SHARED_TOKENS:
        return None
    return place


def _common(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens with which all rows begin."""
    columns = zip(*rows, strict=False)
    return [column[0] for column in takewhile(lambda each: len(set(each)) == 1, columns)]


def _expert_agreement(step: SeenStep) -> tuple[float, float, int]:
    """Return the overlap of experts of places with one token, of any places, and their number.

    In the first layer a router sees little but the token itself, so a token's experts agree. The
    overlap is the mean share of common experts over pairs of different places.
    """
    import numpy as np

    ids, chosen = [], []
    for sample in step.samples[:16]:
        for piece, data in zip(sample.routed, experts.read(sample.routed), strict=True):
            kind = f"u{piece.bytes_per_id}"
            table = np.frombuffer(data, kind).reshape(-1, piece.num_layers, piece.top_k)
            chosen.append(table[:, 0])
            ids.append(np.asarray(sample.ids)[piece.start : piece.start + len(table)])
    if not ids:
        return 0.0, 0.0, 0
    places, tokens = np.concatenate(chosen).astype(int), np.concatenate(ids)
    hot = np.zeros((len(places), int(places.max()) + 1))
    np.put_along_axis(hot, places, 1.0, axis=1)
    repeated = [rows for t in np.unique(tokens) if len(rows := hot[tokens == t]) >= 4]
    count = sum(map(len, repeated))
    if not count:
        return 0.0, 0.0, 0
    same = sum(_overlap(rows) * len(rows) for rows in repeated) / count
    return same, _overlap(hot), count


def _overlap(hot: np.ndarray) -> float:
    """Return the mean share of common experts over pairs of rows, each with 1 at its experts."""
    count, top = len(hot), hot[0].sum()
    return float(((hot.sum(0) ** 2).sum() - count * top) / (count * (count - 1) * top))
