"""Every setting of a run, by section, with its unit and the reason for its default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


class Section(BaseModel):
    """A part of a recipe: frozen, and no key that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PluginSection(BaseModel):
    """A section whose `type` names a plug-in; the plug-in's own `Options` validate the rest."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str
    """Name of the plug-in."""

    @property
    def options(self) -> dict[str, Any]:
        """What is set besides `type`."""
        return dict(self.model_extra or {})


class TasksSection(Section):
    """Which problems to train on."""

    source: str = "twin"
    """`twin` for the generated tasks, or a JSONL file written by `swerl convert`."""
    heldout: str | None = None
    """JSONL file of evaluation tasks; the generated tasks bring their own. No certificate is asked
    for, as public benchmarks are compared whole."""
    uncertified: bool = False
    """Whether to train on tasks of a file that `swerl tasks vet` did not certify as they stand. A
    broken or leaky task teaches what nobody wants learned. Generated tasks need no certificate."""
    solve_rate: tuple[float, float] | None = None
    """Only tasks whose probed solve rate lies between these two, such as [0.1, 0.9]: tasks that are
    always or never solved carry no signal. None takes all, probed or not."""
    num_train: int = Field(512, ge=1)
    """Generated training tasks. Enough that few repeat within a run of the twin."""
    num_heldout: int = Field(200, ge=0)
    """Generated evaluation tasks: held-out variants of the trained templates."""
    num_unseen: int = Field(100, ge=0)
    """Generated evaluation tasks of the two templates that are never trained on."""


class ModelShape(Section):
    """Sizes of a dense Qwen3 that swerl makes itself."""

    num_layers: int = Field(2, ge=1)
    """Layers; four were no better on the twin's tasks, and less stable."""
    hidden_size: int = Field(128, ge=2)
    """Width."""
    ffn_hidden_size: int = Field(384, ge=1)
    """Feed-forward width."""
    num_heads: int = Field(4, ge=1)
    """Query heads."""
    num_kv_heads: int = Field(2, ge=1)
    """Key and value heads; fewer than the query heads, as in larger Qwen3 models."""
    head_dim: int = Field(32, ge=2)
    """Width of a head."""
    vocab_size: int = Field(512, ge=300)
    """Tokens; a small vocabulary keeps the output layer cheap on a CPU."""
    max_positions: int = Field(1024, ge=16)
    """Longest row in tokens."""
    rope_theta: float = Field(1e6, gt=0)
    """Base of the rotary frequencies: Qwen3's."""
    init_std: float = Field(0.06, gt=0)
    """Standard deviation of fresh matrices. Three times that of large models: so narrow a model
    learns to copy from its context in half as many steps."""


class WarmStartSection(Section):
    """Supervised warm start of a model that swerl makes itself."""

    steps: int = Field(600, ge=0)
    """Optimizer steps; the policy starts at about a quarter solved."""
    batch_size: int = Field(32, ge=1)
    """Scripted trajectories a step."""
    lr: float = 3e-3
    """Peak learning rate; falls linearly to a tenth."""
    wrong_share: float = Field(0.7, ge=0, le=1)
    """Share of trajectories with a random fix, so that the policy is left something to learn."""


class ModelSection(Section):
    """The policy that is trained."""

    family: str = "tiny"
    """Name of the model family."""
    path: Path | None = None
    """Folder in Hugging Face format; none makes and warm-starts a tiny model."""
    parser: str = Field("builtin", pattern=r"^(builtin|sglang:[\w.-]+(\+[\w.-]+)?)$")
    """Who reads calls and thinking: the family, or `sglang:CALLS` or `sglang:CALLS+REASONING`."""
    parser_python: Path | None = None
    """Interpreter that has SGLang, for its parsers; none for swerl's own."""
    shape: ModelShape = ModelShape()
    warm_start: WarmStartSection = WarmStartSection()


class ShapingSection(Section):
    """Rules that take something off a reward, each by its name; 0 turns a rule off."""

    overlong: float = Field(0.0, ge=0)
    """Taken off an Episode whose longest conversation fills `max_context_tokens`; a part of it from
    `overlong_from` on. A solved Task is worth 1, and the paper of DAPO takes off as much."""
    overlong_from: float = Field(0.8, ge=0, lt=1)
    """Share of `max_context_tokens` at which `overlong` begins; the paper's value."""
    malformed: float = Field(0.0, ge=0)
    """Taken off an Episode whose every reply holds a tool call that cannot be read; of fewer
    such replies their share."""


class RolloutSection(Section):
    """How Episodes are made."""

    groups_per_step: int = Field(8, ge=1)
    """Tasks an optimizer step."""
    episodes_per_group: int = Field(8, ge=1)
    """Attempts at each Task of a step."""
    concurrency: int = Field(16, ge=1)
    """Episodes at once, each with one sandbox; bounded by the machine, not by the engine."""
    order: Literal["random", "easy-first"] = "random"
    """Order of an epoch's tasks: by chance, or by falling solve rate with unprobed ones last."""
    temperature: float = Field(1.0, gt=0)
    max_new_tokens: int = Field(96, ge=1)
    """Most tokens of one reply."""
    max_context_tokens: int = Field(1024, ge=16)
    """Most tokens of one conversation."""
    max_turns: int = Field(8, ge=1)
    """Most replies of one Episode."""
    reward: str = "solved"
    """Name of the reward rule."""
    shaping: ShapingSection = ShapingSection()
    group_filter: Literal["none", "zero-variance", "mixed-verdicts"] = "none"
    """Which Groups are trained: all, those with different rewards, or those with both solved and
    unsolved Episodes (DAPO's dynamic sampling). Others are replaced by Groups of more Tasks."""
    oversample: float = Field(1.0, ge=1, le=8)
    """Tasks begun for each one wanted, with a filter. More leaves fewer rounds to wait for; what is
    too much is not trained."""
    refill_rounds: int = Field(3, ge=0)
    """How often Groups that the filter left out are replaced; then a step is trained with fewer."""
    refills: int = Field(2, ge=0)
    """How often an Episode lost to machinery is tried again."""
    max_infra_rate: float = Field(0.25, ge=0, le=1)
    """Share of a step's Episodes that may be lost to machinery before the run stops."""

    @field_validator("oversample")
    @classmethod
    def _has_a_filter(cls, value: float, info: ValidationInfo) -> float:
        if value > 1 and info.data.get("group_filter") == "none":
            raise ValueError(
                "without rollout.group_filter this would only throw Groups away; set one"
            )
        return value


class ScheduleSection(Section):
    """When rollouts and optimizer steps take place."""

    mode: Literal["sync", "one-step-off", "async"] = "sync"
    """`sync`: one after the other, every token by the weights that train on it. `one-step-off`: the
    next step's rollouts run while the trainer learns, one version behind. `async`: a standing pool
    of Groups; slow ones hold nobody up. The last two need engines beside the trainer."""
    max_staleness: int = Field(3, ge=0)
    """For `async`: most weight versions between those that sampled a token and those that train on
    it. Losses stay close to what is on policy for a few; what a slow Group needs more is waited
    for. 0 is `sync`."""
    pool: float = Field(2.0, ge=1, le=16)
    """For `async`: Groups begun and not yet trained, for each one of a step. Twice as many keep the
    engine busy while a step's own are at their last Episodes; more only makes them staler."""
    too_stale: Literal["wait", "drop"] = "wait"
    """For `async`, of a Group that would go over `max_staleness`: the trainer waits for it, or it
    is dropped. Dropping is faster, and starves slow and hard Tasks."""
    replies: Literal["keep", "finish", "retry"] = "keep"
    """For `async`, of replies under way when weights change: they keep their tokens and go on with
    the new weights, are finished with the old ones first, or are thrown away and asked for anew.
    `keep` loses neither time nor tokens; the other two need `gateway.processes = 1`."""


class GatewaySection(Section):
    """Where agents find their model."""

    bind: str = "127.0.0.1"
    """Address to listen on. Loopback suffices wherever sandboxes bring their own way back; another
    is for sandboxes that come in by a public URL. Nothing is served without a session's key."""
    port: int = Field(0, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    processes: int = Field(1, ge=1, le=64)
    """Processes that serve; one is the controller's own, and one core of it serves over a hundred
    turns a second. More than one needs an engine behind a URL."""
    history: Literal["exact", "template"] = "exact"
    """What the model sees of its own past: what it said, token by token, or what its chat template
    makes of it now. The template of a thinking model drops old thoughts, and each time that it does
    so a new row to train begins; exact keeps one row a conversation."""


class BudgetsSection(Section):
    """Time budgets in seconds, each inside the next."""

    model_call_s: float = Field(30, gt=0)
    """One reply of the model."""
    tool_s: float = Field(60, gt=0)
    """One tool call of the agent; the built-in agent enforces it."""
    agent_s: float = Field(120, gt=0)
    """The agent's whole work on one Task."""
    grading_s: float = Field(150, gt=0)
    """Grading one patch, its sandbox's start included."""
    episode_s: float = Field(300, gt=0)
    """A whole Episode: agent, diff and grading."""
    sandbox_s: float = Field(600, gt=0)
    """Life of one sandbox, after which it is gone even if its owner died."""


class LimitsSection(Section):
    """What one sandbox may use."""

    memory_mib: int = Field(1024, ge=16)
    num_processes: int = Field(128, ge=8)
    num_cpus: float = Field(1.0, gt=0)
    disk_mib: int = Field(1024, ge=16)


class TrainerSection(Section):
    """The optimizer and its processes."""

    ranks: int = Field(1, ge=1)
    """Processes; one is steadiest for a tiny model on two cores."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share one copy of the weights; the rest of the ranks split the batch."""
    pipeline_parallel: int = Field(1, ge=1)
    """Stages that the layers are split into."""
    context_parallel: int = Field(1, ge=1)
    """Ranks that share one sequence; long contexts need it to fit."""
    expert_parallel: int = Field(1, ge=1)
    """Ranks that share one set of experts; 1 for a dense model."""
    expert_tensor_parallel: int = Field(1, ge=1)
    """Ranks that share one expert; small experts are slower when split."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Numbers of weights and activations. bf16, for GPUs, keeps an fp32 copy of the weights in the
    optimizer and sums gradients in fp32; on CPU it is slower and less exact."""
    recompute: bool = False
    """Whether activations are computed again in the backward pass: slower, far less memory."""
    offload_optimizer: bool = False
    """Whether the optimizer's state lives in the host's memory."""
    threads: int = Field(1, ge=1)
    """Torch threads a rank; more only helps where cores are idle."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds for all ranks to start and to load the model; a large one takes minutes to read."""
    step_timeout_s: float = Field(7200.0, gt=0)
    """Seconds after which a step, a checkpoint or a publication counts as hanging: every rank's
    stack goes to its log and the trainer fails. The longest planned step takes half an hour."""
    restarts: int = Field(0, ge=0)
    """How often a run starts again by itself from its last checkpoint after a rank died or hung. 0,
    as what kills a rank once mostly does so again; machines that fail by themselves want some."""
    lr: float = Field(4e-4, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(10, ge=0)
    """Steps of linear warm-up; without it small models collapse."""
    lr_end: float = Field(1.0, ge=0, le=1)
    """Learning rate at the last step over its peak, reached linearly; 1 keeps it constant."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the gradient's running mean; Adam's usual value."""
    adam_beta2: float = Field(0.98, ge=0, lt=1)
    """Decay of the squared gradient's running mean; below 0.999, as runs are short."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices; norms are never decayed."""
    clip_grad: float = Field(1.0, gt=0)
    """Largest norm of the whole gradient."""
    save_every: int = Field(1, ge=1)
    """Steps between checkpoints; the last step always has one. What a crash undoes is redone."""
    keep_every: int = Field(0, ge=0)
    """Every n-th step's checkpoint is kept for good; 0 keeps the two newest and the best one. A
    checkpoint takes 12 bytes a parameter."""
    async_save: bool = True
    """Whether training goes on while a checkpoint is written. It takes the host as much memory as
    a checkpoint has bytes; a step is committed when its checkpoint is whole, with either."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps that a step's Groups are split into. More learn faster from the same tokens
    and less on policy; with one, the clip of an algorithm hardly acts."""
    max_skipped_steps: int = Field(3, ge=0)
    """Steps in a row that may be skipped because loss or gradients are not finite. One may be bad
    luck; a row of them says that the run is lost."""
    tokens_per_micro_batch: int = Field(16384, ge=2)
    """Tokens of one forward pass of one rank: what the memory is planned for. A row has this much
    room on each of its context ranks; a longer one is refused."""
    routing_replay: bool = False
    """Whether a mixture-of-experts model trains with the experts that the engine chose, which
    `engine.routed_experts` records: about 1 kB a token, and nearly the engine's probabilities."""


class ClusterSection(Section):
    """The GPUs of a run."""

    nodes: int = Field(1, ge=1)
    gpus_per_node: int = Field(0, ge=0)
    """0 runs on CPU."""
    gpu: str = "h100"
    """Kind of GPU: a name in the price book."""
    gpus_per_engine: int = Field(8, ge=1)
    """GPUs of one engine; one node's, so that its traffic stays inside the node."""
    colocate: bool = True
    """Whether engines and trainer take turns on the same GPUs; else each has its own."""
    weight_sync: Literal["auto", "disk", "tensor", "distributed"] = "auto"
    """How weights reach the engines: through a folder, through memory that both share, or by a
    broadcast. `auto` takes `tensor` on shared GPUs, `distributed` on separate ones, and `disk`
    without GPUs or where the engine takes no other."""
    weight_bucket_mib: int = Field(1024, ge=1)
    """Largest piece in which weights are sent; trainer and engine each hold one more meanwhile."""
    weight_bucket_s: float = Field(300.0, gt=0)
    """Seconds that a server may take for one piece, before it is given up."""
    launcher: Literal["local", "ray", "ssh", "slurm"] = "local"
    """Who starts processes: this machine; a Ray cluster that is there; or a Ray cluster of the
    run's own on `hosts` or in the Slurm allocation that the command runs in. Only a cluster of the
    run's own is ended with it."""
    ray_address: str = "auto"
    """Address of the cluster for `ray`; `auto` is the one that this machine belongs to."""
    hosts: tuple[str, ...] = ()
    """Machines for `ssh`, as ssh takes them. Ranks fill them in the order of their own names."""
    ssh: tuple[str, ...] = ("ssh", "-o", "BatchMode=yes")
    """Command that runs another on a host, which is added to it. It must never ask a question."""
    head_address: str = ""
    """Address of this machine that the hosts reach; empty takes that of the route to them."""
    sandbox_cpus: int = Field(0, ge=0)
    """CPUs of each machine for Episodes' sandboxes, besides those of ranks and engines. With 0 all
    sandboxes are beside the controller, which suffices until its CPUs are busy with tests."""


class CostSection(Section):
    """What a run is assumed to need, as low, middle and high case."""

    step_minutes: tuple[float, float, float] = (20, 25, 30)
    """Minutes of one step; the published estimate for 64 episodes on 64 H100."""
    sandbox_seconds: tuple[float, float, float] | None = None
    """Sandbox-seconds of one Episode, the agent's and the grading sandbox together; none scales
    520, 1,140 and 2,400 s, which belong to an agent budget of 1,800 s, to this recipe's."""
    prices: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """US dollars by the price book's names, in place of its own: `h200_hour` of one GPU,
    `local_vcpu_second` and `local_gib_second` of a sandbox. There your own cost nothing."""
    max_dollars: float | None = Field(None, gt=0)
    """US dollars after which the run stops at the end of a step; none never does. Estimated by the
    price book, GPUs and sandboxes together. The run goes on when the key is raised: the keys of
    this section may differ from the recipe of the run's folder."""


class EvalSection(Section):
    """Evaluation on held-out Tasks before and after training."""

    every: int = Field(0, ge=0)
    """Steps between evaluations during training; 0 evaluates at start and end only."""
    attempts: int = Field(1, ge=1)
    """Episodes of each Task, k; with more than one pass@k is reported beside pass@1."""
    temperature: float | None = Field(None, gt=0)
    """Sampling temperature; none takes `rollout.temperature`: that of the policy in training."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Most tokens of one reply; none takes `rollout.max_new_tokens`."""
    best: str = "heldout"
    """Split by whose pass@1 the best step is chosen; its checkpoint is kept."""


class MetricsSection(Section):
    """Where metrics go besides the run folder."""

    sinks: tuple[str, ...] = ()
    """Any of `trackio` and `wandb`."""
    project: str = "swerl"


class Recipe(Section):
    """One run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its folder under `runs/`."""
    seed: int = 0
    steps: int = Field(45, ge=1)
    """Optimizer steps."""
    tasks: TasksSection = TasksSection()
    model: ModelSection = ModelSection()
    sandbox: PluginSection = PluginSection(type="local")
    harness: PluginSection = PluginSection(type="builtin")
    engine: PluginSection = PluginSection(type="torch-cpu")
    algorithm: PluginSection = PluginSection(type="gspo")
    trainer: TrainerSection = TrainerSection()
    rollout: RolloutSection = RolloutSection()
    schedule: ScheduleSection = ScheduleSection()
    gateway: GatewaySection = GatewaySection()
    budgets: BudgetsSection = BudgetsSection()
    limits: LimitsSection = LimitsSection()
    cluster: ClusterSection = ClusterSection()
    eval: EvalSection = EvalSection()
    cost: CostSection = CostSection()
    metrics: MetricsSection = MetricsSection()
