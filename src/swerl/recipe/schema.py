"""Every setting of a run, by section, with its unit and the reason for its default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

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
    min_swap_bits: float = Field(0.0, ge=0)
    """Train only on tasks whose forged report would have to guess this many bits, as vetting found.
    8 leaves a guess one chance in 256. Default 0: tasks whose tests have no value to swap are
    useful too."""
    min_swap_share: float = Field(0.0, ge=0, le=1)
    """Train only on tasks with a secret swap in this share of the tests to fix. A forged report may
    pass all others, so 1 closes that gap. Default 0, as for `min_swap_bits`."""
    num_train: int = Field(512, ge=1)
    """Number of generated training tasks. With 512, few repeat within a run of the twin."""
    num_heldout: int = Field(200, ge=0)
    """Number of generated evaluation tasks: held-out variants of the trained templates."""
    num_unseen: int = Field(100, ge=0)
    """Number of generated evaluation tasks from the two templates that are never trained."""


class ModelShape(Section):
    """Sizes of a dense Qwen3 that swerl creates."""

    num_layers: int = Field(2, ge=1)
    """Number of layers. Four were no better on the twin's tasks, and less stable."""
    hidden_size: int = Field(128, ge=2)
    """Size of the residual stream."""
    ffn_hidden_size: int = Field(384, ge=1)
    """Size of the feed-forward layer."""
    num_heads: int = Field(4, ge=1)
    """Number of query heads."""
    num_kv_heads: int = Field(2, ge=1)
    """Number of key and value heads; fewer than query heads, as in larger Qwen3 models."""
    head_dim: int = Field(32, ge=2)
    """Size of one head."""
    vocab_size: int = Field(512, ge=300)
    """Size of the vocabulary. A small one keeps the output layer cheap on a CPU."""
    max_positions: int = Field(1024, ge=16)
    """Longest row in tokens."""
    rope_theta: float = Field(1e6, gt=0)
    """Base of the rotary frequencies; Qwen3's value."""
    init_std: float = Field(0.06, gt=0)
    """Standard deviation of new matrices. It is three times the usual value: such a narrow model
    then learns to copy from its context in half as many steps."""


class WarmStartSection(Section):
    """Supervised warm start of a model that swerl creates."""

    steps: int = Field(600, ge=0)
    """Optimizer steps. After 600 the policy solves about a quarter of the tasks."""
    batch_size: int = Field(32, ge=1)
    """Scripted trajectories per step."""
    lr: float = 3e-3
    """Peak learning rate; it falls linearly to a tenth."""
    wrong_share: float = Field(0.7, ge=0, le=1)
    """Share of trajectories with a random fix, so that RL has something left to improve."""


class ModelSection(Section):
    """The model to train."""

    family: str = AUTO_FAMILY
    """Name of the model family. `auto` reads it from config.json and the chat template of `path`;
    a model that swerl creates is `tiny`."""
    path: Path | None = None
    """Folder in Hugging Face format. None creates and warm-starts a tiny model."""
    shape: ModelShape = ModelShape()
    warm_start: WarmStartSection = WarmStartSection()

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
    linearly from 0 at `overlong_from`. A solved Task is worth 1; the DAPO paper subtracts 1."""
    overlong_from: float = Field(0.8, ge=0, lt=1)
    """Fraction of `max_context_tokens` at which `overlong` begins; the paper's value."""
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
    order: Literal["random", "easy-first"] = "random"
    """Order of the tasks in an epoch: random, or easiest first with unmeasured ones last."""
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
    group_filter: Literal["none", "zero-variance", "mixed-verdicts"] = "none"
    """Groups to train: all, those with different rewards, or those with both solved and unsolved
    Episodes (DAPO's dynamic sampling). Other Groups are replaced by Groups of more Tasks."""
    oversample: float = Field(1.0, ge=1, le=8)
    """With a filter: Tasks started for each one needed. A higher value needs fewer rounds; surplus
    Groups are discarded."""
    refill_rounds: int = Field(3, ge=0)
    """Rounds of replacement for Groups that the filter rejected; then the step has fewer Groups."""
    refills: int = Field(2, ge=0)
    """Retries of an Episode that was lost to an infrastructure failure."""
    resume_turns: bool = True
    """After a crash or a lost sandbox, continue an Episode from its last Turn: a new sandbox, the
    recorded replies, then the engine. No sampled token is lost. False starts it again."""
    max_infra_rate: float = Field(0.25, ge=0, le=1)
    """Maximum fraction of a step's Episodes lost to infrastructure; above it the run stops."""

    @field_validator("oversample")
    @classmethod
    def _has_a_filter(cls, value: float, info: ValidationInfo) -> float:
        if value > 1 and info.data.get("group_filter") == "none":
            raise ValueError("without rollout.group_filter this only discards Groups; set a filter")
        return value


class ScheduleSection(Section):
    """When rollouts and optimizer steps run."""

    mode: Literal["sync", "one-step-off", "async"] = "sync"
    """`sync`: one after the other; every token is sampled by the weights that train on it.
    `one-step-off`: the next step's rollouts run during the optimizer step, one version behind.
    `async`: a pool of Groups; slow Groups delay no others. The last two need GPUs of their own for
    the engines."""
    max_staleness: int = Field(3, ge=0)
    """For `async`: maximum weight versions between sampling a token and training on it. A few keep
    the loss close to on-policy; a slower Group makes the trainer wait. 0 is `sync`."""
    pool: float = Field(2.0, ge=1, le=16)
    """For `async`: running Groups divided by Groups per step. 2 keeps the engine busy while a
    step's last Episodes finish; more only makes Groups staler."""
    too_stale: Literal["wait", "drop"] = "wait"
    """For `async`: if a Group would exceed `max_staleness`, wait for it or drop it. Dropping is
    faster, but it starves slow and hard Tasks."""
    replies: Literal["keep", "finish", "retry"] = "keep"
    """For `async`: running replies when the weights change. `keep`: they keep their tokens and
    continue with the new weights. `finish`: the update waits for them. `retry`: they are discarded
    and sampled again. `keep` loses neither time nor tokens."""


class SftSection(Section):
    """Train on recorded Episodes in place of new ones: supervised learning, rejection sampling."""

    sources: tuple[Path, ...] = ()
    """Folders of `swerl train`, `rollout`, `eval` or `serve`, and Parquet files of rows. Empty:
    Episodes are sampled. Evaluations during training are never used."""
    verdicts: tuple[Literal["solved", "unsolved", "timeout", "cheat", "ungraded"], ...] = (
        "solved",
    )
    """Verdicts to keep; `ungraded` are the sessions of `swerl serve`."""
    min_reward: float | None = None
    """Least reward to keep. None: any."""
    max_tokens: int | None = Field(None, ge=2)
    """Longest row to keep, in tokens. None: the longest that the trainer takes."""
    agents: tuple[str, ...] = ()
    """Agents whose Episodes are kept. Empty: all."""
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

    bind: str = "127.0.0.1"
    """Address to listen on. Loopback is enough for backends with their own way back; use another
    address for sandboxes that connect by a public URL. Every request needs a session's key."""
    port: int = Field(0, ge=0, le=65535)
    """Port to listen on; 0 chooses a free one."""
    history: Literal["exact", "template"] = "exact"
    """The model's view of its own past: the exact sampled tokens, or a new rendering by its chat
    template. The template of a thinking model drops old thoughts, and each rewrite starts a new
    training row; `exact` keeps one row per conversation."""


class BudgetsSection(Section):
    """Time budgets in seconds, each inside the next."""

    model_call_s: float = Field(30, gt=0)
    """One reply of the model."""
    tool_s: float = Field(60, gt=0)
    """One tool call of the agent; the built-in agent enforces it."""
    agent_s: float = Field(120, gt=0)
    """The agent's whole run on one Task."""
    grading_s: float = Field(150, gt=0)
    """Grading one patch, including the start of its sandbox."""
    episode_s: float = Field(300, gt=0)
    """A whole Episode: agent, diff and grading."""
    sandbox_s: float = Field(600, gt=0)
    """Lifetime of one sandbox; after it the sandbox is removed even if its owner died."""


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
    expert_tensor_parallel: int = Field(1, ge=1)
    """Ranks that share one expert; small experts are slower when split."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format of weights and activations. bf16 is for GPUs: the optimizer keeps fp32 weights
    and gradients are summed in fp32. On CPU it is slower and less exact."""
    recompute: bool | Annotated[int, Field(ge=1)] = False
    """Recompute activations backwards: slower, far less memory. A number: that many layers."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory."""
    require_kernels: bool = True
    """Refuse GPUs for a model with linear attention without the kernels of `swerl[gpu]`. Without
    them a loop in Python takes 13 to 21 seconds a micro-batch of 96,000 tokens (estimated)."""
    threads: int = Field(1, ge=1)
    """Torch threads per rank. More help only if cores are idle."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds for all ranks to start and load the model; a large model takes minutes to read."""
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
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the gradient's running mean; Adam's usual value."""
    adam_beta2: float = Field(0.98, ge=0, lt=1)
    """Decay of the squared gradient's running mean; below 0.999 because runs are short."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices; norms are never decayed."""
    clip_grad: float = Field(1.0, gt=0)
    """Largest norm of the whole gradient."""
    save_every: int = Field(1, ge=1)
    """Steps between checkpoints; the last step always has one. Steps after a checkpoint are
    repeated after a crash."""
    keep_every: int = Field(0, ge=0)
    """Keep the checkpoint of every n-th step for good; 0 keeps the two newest and the best one. A
    checkpoint has 12 bytes per parameter."""
    async_save: bool = True
    """Continue training while a checkpoint is written. This needs as much host memory as the
    checkpoint has bytes. In either case a step is committed when its checkpoint is whole."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer updates per step; the step's Groups are split over them. More updates learn faster
    from the same tokens but less on-policy; with one, an algorithm's clip rarely acts."""
    max_skipped_steps: int = Field(3, ge=0)
    """Consecutive steps that may be skipped because loss or gradients are not finite. One can be
    an outlier; several in a row mean that the run has diverged."""
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
    weight_bucket_mib: int = Field(1024, ge=1)
    """Maximum size of one piece of weights; trainer and engine each hold one piece extra."""
    weight_bucket_s: float = Field(300.0, gt=0)
    """Seconds for a server to receive one piece; after that the server is marked as lost."""
    launcher: Literal["local", "ray"] = "local"
    """Where processes start: on this machine, or on the machines of a Ray cluster."""
    ray_address: str = "auto"
    """Address of the cluster for `ray`; `auto` is the cluster of this machine."""
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
    """Cap in US dollars, GPUs and sandboxes together by the price book: the run stops at the end of
    the step that reaches it. None: no cap. Raise the key and run the same command to continue: the
    keys of this section may differ from the recipe in the run folder."""


class EvalSection(Section):
    """Evaluation on held-out Tasks before and after training."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates only at the start and the end."""
    attempts: int = Field(1, ge=1)
    """Episodes per Task, k. With more than one, pass@k is reported beside pass@1."""
    temperature: float | None = Field(None, gt=0)
    """Sampling temperature. None: `rollout.temperature`, as in training."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of one reply. None: `rollout.max_new_tokens`."""
    best: str = "heldout"
    """Split whose pass@1 selects the best step; the checkpoint of that step is kept."""


class MetricsSection(Section):
    """Trackers that receive the metrics, besides the run folder."""

    sinks: tuple[Literal["trackio", "wandb", "otel"], ...] = ()
    """Any of `trackio`, `wandb`, and `otel` for an OpenTelemetry collector or Prometheus."""
    project: str = "swerl"
    """Project name at the trackers."""
    otlp_endpoint: str = "http://127.0.0.1:4318"
    """For `otel`: address that takes OTLP over HTTP, without `/v1/metrics`. The default is a
    collector's usual port on this machine."""


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
        weights = [0.0 if each.held_out else each.weight for each in self.harness]
        return tuple(weight / (sum(weights) or 1.0) for weight in weights)
