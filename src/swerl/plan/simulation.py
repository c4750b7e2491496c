"""Estimate the speed of a GPU run: minutes a step, rollouts a GPU-hour, idle time.

Episodes are drawn, with turns, tokens and tool times. Their engines are computed at one mean load:
the number of replies at once at which the Episodes take as long as the engines need. Rates come
from data sheets, the model's shape and the assumptions below. No GPU run has confirmed them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from math import ceil, exp, log

from swerl.core.errors import RecipeError
from swerl.plan.activations import recomputed_layers
from swerl.plan.cost import PASSING_SHARE, Assumption
from swerl.plan.layout import Layout
from swerl.plan.memory import GPUS, GpuModel, KvCache, recipe_state, state_bytes, token_bytes
from swerl.plan.parameters import model_params, row_cost, trained_params
from swerl.plan.shape import Shape
from swerl.recipe.schema import Recipe

STEPS = 8
"""Simulated steps; further ones change the mean by a few percent."""
_ROUNDS = 20
"""Iterations in which the load of engines settles."""
_BF16 = 2
_BOOT_S = {"e2b": 1.0, "docker": 2.0, "local": 0.1}
_FIRST_PROMPT = {"claude-code": 11_000, "codex": 9_000, "opencode": 8_000, "qwen-code": 20_000}
"""Tokens of an agent's first request; 1,500 for other agents."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """Means of the simulated steps, and the assumptions."""

    assumptions: tuple[Assumption, ...]
    step_s: float
    rollout_s: float
    """Seconds in which a step's Episodes are produced."""
    train_s: float
    waits: Mapping[str, float]
    """Fraction of a step by what it waits for, largest first; a rollout waits for its last
    Episode."""
    engine_busy: float
    """Fraction of the time in which an engine reads or replies."""
    gpu_busy: float
    """Fraction of all GPUs' time in which they sample or train."""
    timed_out: float
    """Fraction of Episodes that the agent's budget stops."""
    row_tokens: float
    """Tokens of an Episode."""
    sandbox_s: float
    """Sandbox-seconds of an Episode."""
    rollouts_per_gpu_hour: float
    """Trained Episodes."""


def simulate(
    recipe: Recipe,
    shape: Shape,
    layout: Layout,
    cache: KvCache,
    *,
    rows: Iterable[Assumption] = (),
) -> Simulation:
    """Simulate some steps of a GPU recipe; `rows` replace its `assumptions`.

    Raises RecipeError if the speed of its GPUs is unknown.
    """
    rows = tuple(rows) or assumptions(recipe, shape)
    value = {row.key: row.value for row in rows}
    gpu, chance = GPUS.get(recipe.cluster.gpu), random.Random(recipe.seed)
    if gpu is None:
        message = f"the speed of a {recipe.cluster.gpu!r} is unknown"
        raise RecipeError(message, hint=f"known are {', '.join(sorted(GPUS))}")
    machine = _Machine(recipe, shape, layout, cache, gpu, value)
    run = _pooled if recipe.schedule.mode == "async" else _batch
    steps = [run(machine, chance) for _ in range(STEPS)]
    step_s = _mean(step.seconds for step in steps)
    episodes = [episode for step in steps for episode in step.episodes]
    waits = _sum(*(step.waits for step in steps))
    engine_busy = _mean(step.engine_s for step in steps) / step_s
    train_s = _mean(step.train_s for step in steps)
    training = 1.0 if layout.colocated else layout.ranks / layout.num_gpus
    sampling = 1.0 if layout.colocated else 1 - training
    return Simulation(
        assumptions=rows,
        step_s=step_s,
        rollout_s=_mean(step.rollout_s for step in steps),
        train_s=train_s,
        waits=_shares(waits),
        engine_busy=engine_busy,
        gpu_busy=sampling * engine_busy + training * train_s / step_s,
        timed_out=_mean(episode.timed_out for episode in episodes),
        row_tokens=_mean(episode.tokens for episode in episodes),
        sandbox_s=_mean(episode.seconds for episode in episodes),
        rollouts_per_gpu_hour=3600 * _batch_size(recipe) / step_s / layout.num_gpus,
    )


def assumptions(recipe: Recipe, shape: Shape) -> tuple[Assumption, ...]:
    """Return every number that a recipe does not set."""
    agents = zip(recipe.agents, recipe.agent_shares, strict=True)
    prompt = sum(share * _FIRST_PROMPT.get(agent.type, 1_500) for agent, share in agents)
    twin, experts = recipe.tasks.source == "twin", bool(shape.num_experts)
    boot_s = _BOOT_S.get(recipe.sandbox.type, 5.0)
    return tuple(
        Assumption(key, value, unit, source)
        for key, value, unit, source in (
            ("first_prompt", round(prompt), "tokens", "the agents' first requests, measured"),
            ("turns", 5 if twin else 30, "turns, median", "assumed"),
            ("reply_tokens", 150, "tokens a turn, median", "assumed: rows of 31k tokens, as in"),
            ("result_tokens", 100 if twin else 180, "tokens a turn, median", "NVIDIA's SWE runs"),
            ("tool_s", 0.3 if twin else 2.5, "s a turn, median", "assumed"),
            ("grading_s", 1 if twin else 150, "s, median", "assumed: a second start and the tests"),
            ("boot_s", boot_s, "s, median", f"{recipe.sandbox.type}, image at hand"),
            ("passing_share", PASSING_SHARE, "of groups", "assumed: groups with both outcomes"),
            ("train_mfu", 0.05 if experts else 0.30, "of the peak", "assumed, with exchanges"),
            ("train_layer_s", 0.0015, "s a layer", "assumed: start of 400 kernels a micro-batch"),
            ("prompt_mfu", 0.2 if experts else 0.4, "of the peak", "assumed"),
            ("bandwidth_share", 0.6, "of the peak", "assumed: decoding"),
            ("layer_s", 0.0001, "s a layer", "assumed: start of its kernels, all-reduce"),
            ("host_bytes_per_s", 25e9, "bytes/s a GPU", "assumed: half of PCIe 5"),
            ("host_adam_per_s", 2e9, "parameters/s a node", "assumed: offloaded optimizer"),
            ("update_bytes_per_s", 10e9, "bytes/s a GPU", "assumed: weights to engines"),
            ("update_fixed_s", 3.0, "s", "assumed: pause, names, checksum, resume"),
            ("step_fixed_s", 5.0, "s", "assumed: batch, hand-over, commit"),
        )
    )


_SPREADS = {
    **{"turns": 0.6, "reply_tokens": 1.1, "result_tokens": 1.0, "tool_s": 1.5},
    **{"grading_s": 0.6, "boot_s": 0.5},
}
"""Standard deviation of the logarithm of each drawn number, half as large for the twin. Assumed."""


@dataclass(frozen=True, slots=True)
class _Machine:
    """Seconds of each activity on a recipe's GPUs."""

    recipe: Recipe
    shape: Shape
    layout: Layout
    cache: KvCache
    gpu: GpuModel
    value: Mapping[str, float]

    def read_s(self, prompts: Sequence[tuple[int, int]]) -> float:
        """Return the seconds to read prompts, each with its cached tokens and all of them."""
        cost, gpus = row_cost(self.shape), self.layout.gpus_per_engine
        # A forward pass is a third of a training pass.
        rate = 3 * gpus * self.gpu.bf16_flops * self.value["prompt_mfu"]
        work = sum(cost.of(tokens) - cost.of(cached) for cached, tokens in prompts)
        return work / rate + len(prompts) * self._pass_s

    def round_s(self, replies: float, context: float) -> float:
        """Return the seconds of one more token for each of `replies`, of `context` tokens each.

        A round reads the weights that its tokens need (with k of E experts a token, n tokens need
        1 - (1 - k/E)^n of the experts), all keys and values, and linear attention's states twice.
        """
        shape, gpus = self.shape, self.layout.gpus_per_engine
        params = model_params(shape)
        unused: float = (1 - shape.experts_per_token / (shape.num_experts or 1)) ** replies
        weights = (params.total - params.expert + (1 - unused) * params.expert) * _BF16 / gpus
        state = context * token_bytes(shape, gpus) + 2 * state_bytes(shape, gpus)
        memory = self.gpu.bytes_per_s * self.value["bandwidth_share"]
        return (weights + replies * state) / memory + self._pass_s

    def train_s(self, rows: Sequence[int]) -> float:
        """Return the seconds of an optimizer step on rows of these lengths."""
        layout, trainer, value = self.layout, self.recipe.trainer, self.value
        cost = row_cost(self.shape, trainer.lora)
        # A recomputed layer repeats its forward pass, which MFU does not count.
        stage = self.shape.num_layers // layout.pipeline
        again = recomputed_layers(trainer.recompute, stage) / stage
        repeated = 1 + (1 / 2 if trainer.lora.rank else 1 / 3) * again
        rate = layout.ranks * self.gpu.bf16_flops * value["train_mfu"]
        work = sum(map(cost.of, rows)) * repeated / rate
        room = trainer.tokens_per_micro_batch * layout.context * layout.data
        slots = ceil(sum(rows) / room)
        # The first micro-batch passes through all pipeline stages before the last one ends.
        bubble = (slots + layout.pipeline - 1) / slots
        host_s = 0.0
        if trainer.offload_optimizer:
            trained = trained_params(self.shape, trainer.lora)
            host_s = trained / layout.num_nodes / value["host_adam_per_s"]
        return bubble * (work + slots * stage * value["train_layer_s"]) + host_s

    @property
    def update_s(self) -> float:
        """Seconds to load new weights into the engines."""
        sent = model_params(self.shape).total * _BF16 / self.layout.gpus_per_engine
        return sent / self.value["update_bytes_per_s"] + self.value["update_fixed_s"]

    @property
    def switch_s(self) -> float:
        """Seconds in which a colocated trainer's state moves to the host and back."""
        state = recipe_state(self.recipe, self.shape, self.layout)
        moved = 2 * (state.weights + state.optimizer) * self.layout.colocated
        return moved / self.value["host_bytes_per_s"]

    @property
    def _pass_s(self) -> float:
        return self.shape.num_layers * self.value["layer_s"]


@dataclass(slots=True)
class _Episode:
    """A drawn load, and its seconds by activity."""

    prompts: list[int]
    """Tokens of each request's prompt."""
    replies: list[int]
    parts: dict[str, float]
    timed_out: bool = False

    def read(self, cached: float) -> list[tuple[int, int]]:
        """Return the cached and all tokens of each prompt, if a share of its history is cached."""
        ends = [0, *(p + r for p, r in zip(self.prompts, self.replies, strict=True))]
        return [(round(cached * end), p) for end, p in zip(ends, self.prompts, strict=False)]

    @property
    def tokens(self) -> int:
        return self.prompts[-1] + self.replies[-1]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def _drawn(machine: _Machine, chance: random.Random) -> _Episode:
    """Draw one Episode; a full context ends it, as in the gateway."""
    recipe, value = machine.recipe, machine.value

    spread = 0.5 if recipe.tasks.source == "twin" else 1.0

    def draw(key: str) -> float:
        return chance.lognormvariate(log(value[key] or 1e-9), spread * _SPREADS[key])

    rollout, budgets = recipe.rollout, recipe.budgets
    length, tools_s = round(value["first_prompt"]), 0.0
    prompts, replies = list[int](), list[int]()
    for _ in range(min(max(1, round(draw("turns"))), rollout.max_turns)):
        room = min(rollout.max_new_tokens, rollout.max_context_tokens - length)
        if room <= 0 and prompts:
            break
        prompts.append(length)
        replies.append(min(max(1, round(draw("reply_tokens"))), max(room, 1)))
        length += replies[-1] + round(draw("result_tokens"))
        tools_s += min(draw("tool_s"), budgets.tool_s)
    grading_s = min(draw("grading_s"), budgets.grading_s)
    parts = {"starting sandboxes": draw("boot_s"), "tools": tools_s, "grading": grading_s}
    return _Episode(prompts, replies, parts)


def _serve(machine: _Machine, episodes: Sequence[_Episode], slots: int) -> float:
    """Add the engines' seconds to Episodes; return the busy share of an engine under this load."""
    sessions = slots / machine.layout.num_engines
    context = _mean(_mean(episode.prompts) for episode in episodes)
    # What exceeds the cache is evicted evenly and read again.
    cached = min(1.0, machine.cache.tokens / (sessions * context))
    reading = [machine.read_s(episode.read(cached)) for episode in episodes]
    outside = _mean(episode.seconds for episode in episodes)
    tokens = _mean(sum(episode.replies) for episode in episodes)
    replies, stall, round_s = 1.0, 1.0, 0.0
    for _ in range(_ROUNDS):
        round_s = machine.round_s(max(replies, 1.0), context)
        decoding, prompts = tokens * round_s * stall, _mean(reading) * stall
        seconds = outside + decoding + prompts
        # Prompts are read one at a time, and replies wait meanwhile, as in SGLang.
        read_share = min(sessions * _mean(reading) / seconds, 0.9)
        stall = (stall + 1 / (1 - read_share)) / 2
        replies = (replies + sessions * decoding / seconds) / 2
    for episode, read_s in zip(episodes, reading, strict=True):
        agent_s = machine.recipe.budgets.agent_s
        parts = {"replies": sum(episode.replies) * round_s * stall, "prompts": read_s * stall}
        total = sum(parts.values()) + episode.parts["tools"]
        episode.timed_out = total > agent_s
        share = min(1.0, agent_s / total)
        episode.parts |= {name: seconds * share for name, seconds in parts.items()}
        episode.parts["tools"] *= share
    return read_share + (1 - read_share) * (1 - exp(-replies))


@dataclass(frozen=True, slots=True)
class _Step:
    rollout_s: float
    train_s: float
    engine_s: float
    """Busy seconds of an engine."""
    waits: Mapping[str, float]
    """Seconds of the step by what it waits for."""
    episodes: Sequence[_Episode]

    @property
    def seconds(self) -> float:
        return sum(self.waits.values())


def _batch(machine: _Machine, chance: random.Random) -> _Step:
    """Simulate a step of `sync`, whose Groups start together."""
    recipe, rollout = machine.recipe, machine.recipe.rollout
    missing, rollout_s, engine_s = rollout.groups_per_step, 0.0, 0.0
    episodes = list[_Episode]()
    waits: Mapping[str, float] = {}
    for number in range(1 + rollout.refill_rounds):
        batch = [_drawn(machine, chance) for _ in range(missing * rollout.episodes_per_group)]
        slots = min(rollout.concurrency, len(batch))
        busy = _serve(machine, batch, slots)
        last = _last_end(batch, slots)
        waits = _sum(waits, {"replacements of groups": last}) if number else _slowest(batch, last)
        rollout_s, episodes = rollout_s + last, [*episodes, *batch]
        engine_s += busy * sum(episode.seconds for episode in batch) / slots
        missing = sum(chance.random() >= _passing(machine) for _ in range(missing))
        if not missing:
            break
    train_s = machine.train_s([episode.tokens for episode in episodes][: _batch_size(recipe)])
    after = {"training": train_s, "the step's own work": machine.value["step_fixed_s"]}
    update = {"switching": machine.switch_s, "weight update": machine.update_s}
    waits = _sum(waits, after, update)
    return _Step(rollout_s, train_s, engine_s, waits, episodes)


def _last_end(episodes: Sequence[_Episode], slots: int) -> float:
    """Return the time of the last end; Episodes start in order as slots become free."""
    ends = [0.0] * slots
    for episode in episodes:
        heapreplace(ends, ends[0] + episode.seconds)
    return max(ends)


def _slowest(episodes: Sequence[_Episode], end: float) -> Mapping[str, float]:
    """Return the activities of the longest Episode, which usually ends last."""
    longest = max(episodes, key=lambda episode: episode.seconds)
    return longest.parts | {"a free slot": end - longest.seconds}


def _pooled(machine: _Machine, chance: random.Random) -> _Step:
    """Simulate a step of `async`, whose pool of Groups is always full."""
    rollout, schedule = machine.recipe.rollout, machine.recipe.schedule
    size, num_groups = rollout.episodes_per_group, rollout.groups_per_step
    pool = ceil(min(schedule.pool, 1.0 + schedule.max_staleness) * num_groups)
    episodes = [_drawn(machine, chance) for _ in range(pool * size)]
    slots = min(rollout.concurrency, len(episodes))
    busy = _serve(machine, episodes, slots)
    groups = num_groups / _passing(machine)
    sampling_s = groups * size * _mean(episode.seconds for episode in episodes) / slots
    # A Group stays in the pool until its last Episode ends, and a step waits for Groups that would
    # be too stale for the next one.
    pool_s = groups * _longest(episodes, size) / pool
    stale_s = _longest(episodes, num_groups * size) / max(schedule.max_staleness, 1)
    rollout_s = max(sampling_s, pool_s, stale_s)
    train_s = machine.train_s([episode.tokens for episode in episodes[: num_groups * size]])
    waits = {"training": train_s, "the step's own work": machine.value["step_fixed_s"]}
    if sum(waits.values()) < rollout_s:
        parts = _shares(_sum(*(episode.parts for episode in episodes)))
        waits = {name: share * rollout_s for name, share in parts.items()}
    waits["weight update"] = machine.update_s
    return _Step(rollout_s, train_s, busy * sampling_s, waits, episodes)


def _longest(episodes: Sequence[_Episode], size: int) -> float:
    """Return the mean seconds of the longest of `size` Episodes."""
    parts = [episodes[first : first + size] for first in range(0, len(episodes), size)]
    return _mean(max(episode.seconds for episode in part) for part in parts)


def _passing(machine: _Machine) -> float:
    """Return the share of Groups that the recipe's filter keeps."""
    filtered = machine.recipe.rollout.group_filter != "none"
    return machine.value["passing_share"] if filtered else 1.0


def _batch_size(recipe: Recipe) -> int:
    return recipe.rollout.groups_per_step * recipe.rollout.episodes_per_group


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _sum(*parts: Mapping[str, float]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def _shares(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the fraction of each part, largest first."""
    whole = sum(parts.values())
    return {name: parts[name] / whole for name in sorted(parts, key=lambda name: -parts[name])}
