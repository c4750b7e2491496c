"""Every setting of a run, by section, with its unit and the reason for its default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from swerl.core.plugins import AUTO_FAMILY
from swerl.recipe.sections import ONE, SEVERAL, AgentSection, PluginSection, Section


class TasksSection(Section):
    """The tasks to train and evaluate on."""

    source: str = "twin"
    """`twin` for the generated tasks, or a JSONL file written by `swerl convert`."""
    heldout: str | None = None
    """JSONL file of evaluation tasks; the generated tasks bring their own. No certificate is
    required, because public benchmarks are compared whole."""
    uncertified: bool = False
    """Train on tasks that `swerl tasks vet` has not certified in their present form. A broken or
    leaky task rewards the wrong behaviour. Generated tasks need no certificate."""
    solve_rate: tuple[float, float] | None = None
    """Train only on tasks with a measured solve rate in this range, such as [0.1, 0.9]: tasks that
    are always or never solved carry no signal. None: no filter."""
    strength: Literal["strong", "some", "none"] = "none"
    """Train only on tasks whose protection against forged reports is at least this strong, as
    vetting found. Default `none`: all, because most public tasks are not `strong`."""
    num_train: int = Field(512, ge=1)
    """Number of generated training tasks. With 512, few repeat within a run of the twin."""
    num_heldout: int = Field(200, ge=0)
    """Number of generated evaluation tasks: held-out variants of the trained templates."""
    num_unseen: int = Field(100, ge=0)
    """Number of generated evaluation tasks from the two templates that are never trained."""


class ModelSection(Section):
    """The model to train."""

    family: str = AUTO_FAMILY
    """Name of the model family. `auto` reads it from config.json and the chat template of `path`;
    a model that swerl creates is `tiny`."""
    path: Path | None = None
    """Folder in Hugging Face format, or a hub id `OWNER/NAME[@REVISION]`, which is fetched once.
    None creates and warm-starts a tiny model."""
    warm_start_steps: int = Field(600, ge=0)
    """Supervised steps that teach a new tiny model its tools. After 600 it solves about a quarter
    of the twin's tasks."""

    @model_validator(mode="before")
    @classmethod
    def _creates_tiny_models(cls, value: Any) -> Any:
        """Set the family of a model that swerl creates."""
        if not isinstance(value, dict) or value.get("path"):
            return value
        if value.get("family", AUTO_FAMILY) != AUTO_FAMILY:
            return value
        return {**value, "family": "tiny"}


class ShapingSection(Section):
    """Penalties that are subtracted from a reward; 0 turns a penalty off."""

    overlong: float = Field(0.0, ge=0)
    """Penalty of an Episode whose longest conversation fills `max_context_tokens`; it grows
    linearly from 0 at 80 % of that. A solved Task is worth 1; the DAPO paper subtracts 1."""
    malformed: float = Field(0.0, ge=0)
    """Penalty times the fraction of replies with an unparsable tool call."""
    unfinished: float = Field(0.0, ge=0)
    """Penalty of an Episode that a turn or token limit stopped, solved or not. Without it a policy
    gains by never ending: one more edit can only help."""


class RolloutSection(Section):
    """How Episodes are run."""

    groups_per_step: int = Field(8, ge=1)
    """Tasks per optimizer step."""
    episodes_per_group: int = Field(8, ge=1)
    """Attempts at each Task."""
    concurrency: int = Field(16, ge=1)
    """Episodes at the same time, each with one sandbox; the machine is the limit."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature. 1.0 samples from the policy that is trained."""
    max_new_tokens: int = Field(96, ge=1)
    """Maximum tokens of one reply."""
    max_context_tokens: int = Field(1024, ge=16)
    """Maximum tokens of one conversation."""
    max_turns: int = Field(8, ge=1)
    """Maximum replies in one Episode."""
    reward: str = "solved"
    """Reward of an attempt: `solved`, `solved-in-time`, a plug-in, or `path/file.py:function`."""
    shaping: ShapingSection = ShapingSection()
    truncated: Literal["train", "mask"] = "train"
    """Episodes that a limit of turns, tokens or time stopped: trained with their reward, or counted
    in their Group's mean and not trained (DAPO's overlong filtering)."""
    group_filter: Literal["none", "zero-variance", "mixed-verdicts"] = "none"
    """Groups to train: all, those with different rewards, or those with both solved and unsolved
    Episodes (DAPO's dynamic sampling). Other Groups are replaced by Groups of more Tasks."""
    refill_rounds: int = Field(3, ge=0)
    """Rounds of replacement for Groups that the filter rejected; then the step has fewer Groups."""


class GradingSection(Section):
    """How solved patches are confirmed."""

    audit: float = Field(0.1, ge=0, le=1)
    """Share of the solved patches that are confirmed with mutated tests, once 50 in a row were
    real; flagged patches always are. 1 confirms all, 0 none. A confirmation runs the tests four
    times more."""
    flags: tuple[str, ...] = ()
    """Further patterns (regular expressions) on added lines; a patch that fits one is
    confirmed."""

    @field_validator("flags")
    @classmethod
    def _are_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return value


class ScheduleSection(Section):
    """When rollouts and optimizer steps run."""

    mode: Literal["sync", "async"] = "sync"
    """`sync`: one after the other; every token is sampled by the weights that train on it.
    `async`: a pool of Groups; slow Groups delay no others. It needs GPUs of their own for the
    engines."""
    max_staleness: int = Field(3, ge=0)
    """For `async`: maximum weight versions between sampling a token and training on it. A few keep
    the loss close to on-policy; a slower Group makes the trainer wait. 0 is `sync`."""
    pool: float = Field(2.0, ge=1, le=16)
    """For `async`: running Groups divided by Groups per step. 2 keeps the engine busy while a
    step's last Episodes finish; more only makes Groups staler."""


class SftSection(Section):
    """Train on recorded Episodes in place of new ones: supervised learning, rejection sampling."""

    sources: tuple[Path, ...] = ()
    """Folders of `swerl train`, `rollout`, `eval` or `serve`. Empty: Episodes are sampled.
    Evaluations during training are never used."""
    verdicts: tuple[Literal["solved", "unsolved", "timeout", "cheat", "ungraded"], ...] = (
        "solved",
    )
    """Verdicts to keep; `ungraded` are the sessions of `swerl serve`."""
    max_per_task: int | None = Field(None, ge=1)
    """Maximum Episodes of one Task, chosen at random: easy Tasks would outweigh hard ones. None:
    all. Copies of the same tokens count once in any case."""
    episodes_per_step: int = Field(32, ge=1)
    """Episodes of one optimizer step; each epoch takes every one, in a new order."""
    evaluate: bool = False
    """Evaluate on the recipe's held-out Tasks, by its agent, engine and sandboxes. If false, none
    of them starts."""


class GatewaySection(Section):
    """The HTTP service through which agents reach the model."""

    history: Literal["exact", "template"] = "exact"
    """The model's view of its own past: the exact sampled tokens, or a new rendering by its chat
    template. The template of a thinking model drops old thoughts, and each rewrite starts a new
    training row; `exact` keeps one row per conversation."""


class BudgetsSection(Section):
    """Time budgets in seconds, each inside the next."""

    model_call_s: float = Field(30, gt=0)
    """One reply of the model. `rollout.max_new_tokens` bounds its length, so a reply that takes
    longer is the engine's fault: the attempt is `infra` and repeated."""
    tool_s: float = Field(60, gt=0)
    """One tool call of the agent; the built-in agent enforces it."""
    agent_s: float = Field(120, gt=0)
    """The agent's whole run on one Task."""
    grading_s: float = Field(150, gt=0)
    """Grading one patch. A sandbox may take as long to open, which no budget counts."""
    episode_s: float = Field(300, gt=0)
    """A whole Episode: agent, diff and grading; its sandboxes open on time of their own."""
    sandbox_s: float = Field(600, gt=0)
    """Lifetime of one sandbox; after it the sandbox is removed even if its owner died."""
    grace_s: float = Field(25, ge=0)
    """After SIGTERM the step under way may last this long; then it is committed or given up.
    Kubernetes kills after 30 s; set a little less than your scheduler's time."""


class LimitsSection(Section):
    """Resource limits of one sandbox."""

    memory_mib: int = Field(1024, ge=16)
    """Memory in MiB; the twin's tests need far less."""
    num_processes: int = Field(128, ge=8)
    """Processes and threads at the same time."""
    num_cpus: float = Field(1.0, gt=0)
    """CPU time per wall time."""
    disk_mib: int = Field(1024, ge=16)
    """Disk beyond the image in MiB."""


LoraTarget = Literal["attention", "mlp", "experts", "delta_net"]


class LoraSection(Section):
    """Adapters (LoRA) that are trained in place of the model's weights."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0 trains all weights. On GPUs a multiple of 8, as kernels require."""
    alpha: float = Field(32.0, gt=0)
    """An adapter's change is multiplied by alpha / rank."""
    targets: tuple[LoraTarget, ...] = Field(
        ("attention", "mlp", "experts", "delta_net"), min_length=1
    )
    """Projections with an adapter: of attention, of dense and shared feed-forward blocks, of routed
    experts, of gated delta nets. The router, norms and embeddings have none."""


class TrainerSection(Section):
    """The optimizer and its processes."""

    ranks: int = Field(1, ge=1)
    """Trainer processes. One gives the steadiest times for a tiny model on two cores."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share one copy of the weights; the remaining factor is data parallelism."""
    pipeline_parallel: int = Field(1, ge=1)
    """Pipeline stages; the layers are split over them."""
    context_parallel: int = Field(1, ge=1)
    """Ranks that share one sequence; long contexts need it for memory."""
    expert_parallel: int = Field(1, ge=1)
    """Ranks that share one set of experts; 1 for a dense model."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format of weights and activations. bf16 is for GPUs: the optimizer keeps fp32 weights
    and gradients are summed in fp32. On CPU it is slower and less exact."""
    recompute: bool | Annotated[int, Field(ge=1)] = False
    """Recompute activations backwards: slower, far less memory. A number: that many layers."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory."""
    step_timeout_s: float = Field(7200.0, gt=0)
    """Seconds after which a step, a checkpoint or a weight update counts as hung: every rank writes
    its stack to its log and the trainer fails. The longest planned step takes half an hour."""
    restarts: int = Field(0, ge=0)
    """Automatic restarts from the last checkpoint after a rank died or hung. Default 0: most
    crashes repeat. Raise it on unreliable machines."""
    lr: float = Field(4e-4, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(10, ge=0)
    """Steps of linear warm-up. Without it small models collapse."""
    lr_end: float = Field(1.0, ge=0, le=1)
    """Learning rate of the last step divided by the peak, reached linearly; 1 keeps it constant."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices; norms are never decayed."""
    save_every: int = Field(1, ge=1)
    """Steps between checkpoints; the last step always has one. Steps after a checkpoint are
    repeated after a crash."""
    async_save: bool = True
    """Continue training while a checkpoint is written. This needs as much host memory as the
    checkpoint has bytes. In either case a step is committed when its checkpoint is whole."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer updates per step; the step's Groups are split over them. More updates learn faster
    from the same tokens but less on-policy. With one, and a rule in `algorithm.mismatch`, the ratio
    is 1 and no clip acts."""
    tokens_per_micro_batch: int = Field(16384, ge=2)
    """Tokens in one forward pass of one rank; memory is planned for this number. A row may have
    this many tokens on each of its context ranks; a longer row is refused."""
    shared_prefixes: bool = False
    """Compute each token once that several rows of a micro-batch begin with: the rows of an Episode
    that forks, and those of a Group. The result is the same up to rounding."""
    lora: LoraSection = LoraSection()
    routing_replay: bool = False
    """Train a mixture-of-experts model with the experts that the engine chose, recorded by
    `engine.routed_experts`. It costs about 1 kB a token and nearly removes the mismatch."""

    @property
    def expert_tensor_parallel(self) -> int:
        """Ranks that share one expert.

        Megatron-Core sums the gradients of unsplit experts over the tensor ranks only if the
        experts are spread over expert ranks.
        """
        return self.tensor_parallel if self.expert_parallel == 1 else 1


class ClusterSection(Section):
    """The GPUs of a run."""

    nodes: int = Field(1, ge=1)
    """Machines."""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs of each machine; 0 runs on CPU."""
    gpu: str = "h100"
    """GPU type: a name in the price book."""
    gpus_per_engine: int = Field(8, ge=1)
    """GPUs of one engine. 8 is one whole node, so that its traffic stays inside the node."""
    colocate: bool = True
    """Engines and trainer share the same GPUs in turns; if false, each has its own GPUs."""
    weight_sync: Literal["auto", "disk", "tensor", "distributed"] = "auto"
    """How weights reach the engines: through a folder, through shared memory, or by a broadcast.
    `auto` chooses `tensor` on shared GPUs, `distributed` on separate GPUs, and `disk` without GPUs
    or if the engine supports no other way."""
    launcher: Literal["local", "ray"] = "local"
    """Machines on which processes start: this one, or those of the Ray cluster of this machine.
    RAY_ADDRESS names another cluster."""
    sandbox_cpus: int = Field(0, ge=0)
    """CPUs of each machine for sandboxes, besides those of ranks and engines. With 0 all sandboxes
    run on the controller's machine, which is enough until its CPUs are busy with tests."""


class CostSection(Section):
    """Assumptions of a run's cost, as low, middle and high case, and its cap."""

    step_minutes: tuple[float, float, float] = (20, 25, 30)
    """Minutes of one step; the published estimate for 64 episodes on 64 H100."""
    sandbox_seconds: tuple[float, float, float] | None = None
    """Sandbox-seconds of one Episode: agent and grading sandbox together. None scales 520, 1,140
    and 2,400 s, which are for an agent budget of 1,800 s, to this recipe's budget."""
    prices: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Prices in US dollars by the price book's names, such as `h200_hour` of one GPU, or
    `local_vcpu_second` and `local_gib_second` of a sandbox. The book's price of `local` is 0."""
    max_dollars: float | None = Field(None, gt=0)
    """Cap in US dollars, GPUs and sandboxes together by the price book: the run stops within
    seconds; finished Episodes stay. None: no cap. Raise the key and run the same command to
    continue: the keys of this section may differ from the recipe in the run folder."""


class EvalSection(Section):
    """Evaluation on held-out Tasks before and after training."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates only at the start and the end."""
    attempts: int = Field(1, ge=1)
    """Episodes per Task, k. With more than one, pass@k is reported beside pass@1."""


class MetricsSection(Section):
    """Trackers that receive the metrics, besides the run folder."""

    sinks: tuple[Literal["trackio", "wandb"], ...] = ()
    """`trackio`, `wandb`, or both."""
    project: str = "swerl"
    """Project name at the trackers."""


class Recipe(Section):
    """One run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its folder under `runs/`."""
    seed: int = 0
    """Seed of tasks, warm start and sampling. Async schedules are not repeatable."""
    steps: int = Field(45, ge=1)
    """Optimizer steps."""
    tasks: TasksSection = TasksSection()
    model: ModelSection = ModelSection()
    sandbox: PluginSection = PluginSection(type="local")
    harness: Annotated[
        Annotated[PluginSection, Tag(ONE)]
        | Annotated[tuple[AgentSection, ...], Field(min_length=1), Tag(SEVERAL)],
        Discriminator(lambda value: SEVERAL if isinstance(value, list | tuple) else ONE),
    ] = PluginSection(type="builtin")
    engine: PluginSection = PluginSection(type="torch-cpu")
    algorithm: PluginSection = PluginSection(type="gspo")
    trainer: TrainerSection = TrainerSection()
    rollout: RolloutSection = RolloutSection()
    sft: SftSection = SftSection()
    schedule: ScheduleSection = ScheduleSection()
    grading: GradingSection = GradingSection()
    gateway: GatewaySection = GatewaySection()
    budgets: BudgetsSection = BudgetsSection()
    limits: LimitsSection = LimitsSection()
    cluster: ClusterSection = ClusterSection()
    eval: EvalSection = EvalSection()
    cost: CostSection = CostSection()
    metrics: MetricsSection = MetricsSection()

    @property
    def agents(self) -> tuple[PluginSection, ...]:
        """The agents: one, or an AgentSection for each table of `[[harness]]`."""
        return (self.harness,) if isinstance(self.harness, PluginSection) else self.harness

    @property
    def agent_shares(self) -> tuple[float, ...]:
        """Each agent's share of the training Groups; 0 if it is held out."""
        if isinstance(self.harness, PluginSection):
            return (1.0,)
        weights = [0.0 if agent.held_out else agent.weight for agent in self.harness]
        return tuple(weight / (sum(weights) or 1.0) for weight in weights)
