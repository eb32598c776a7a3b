"""All settings of a training run, their meaning, and the rules between them.

Each field is declared once; `python -m experiments.train --help` lists them. A config file starts from `get_config()`:

    from experiments import config

    def get_config():
        c = config.get_config()
        c.learner.learning_rate = 1e-5
        return c

`freeze` checks types, bounds and the rules between fields, and returns the frozen `Config`. Every error is raised
before anything is compiled and names field, value and legal choices.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from adrl_kernels.choice import IMPLEMENTATIONS
from ml_collections import config_dict

from adrl_jax.learner.optimizer import OPTIMIZERS
from adrl_jax.models.families import FAMILIES
from adrl_jax.rollout.served import CACHES
from adrl_jax.runtime.choice import CHOICES as REFRESHES
from adrl_jax.runtime.parts import MODES
from experiments import rules, schema
from experiments.learner_config import Learner
from experiments.schema import option

VERIFICATIONS = ("coupled", "rejection")
BANDITS = ("goodput", "beg", "beg_static", "ucb", "thompson", "exp3", "fixed")
ADMISSIONS = ("arrival", "longest_first")
TASKS = ("division", "arithmetic", "gsm8k")
ADAPTING = ("joint", "on_demand", "spot", "off")
IMPORTANCE_WEIGHTS = ("none", "token", "prefix")


@dataclasses.dataclass(frozen=True)
class Task:
    """What is asked and how answers are scored."""

    name: str = option("division", "which task", choices=TASKS)
    path: str = option(
        "", "gsm8k: a folder with train and test files, one .jsonl or .parquet file, or a `datasets` name such as openai/gsm8k"
    )
    train_prompts: int = option(2048, "distinct training prompts; for tasks that read records, at most this many", low=1)
    eval_prompts: int = option(64, "held-out prompts of each evaluation", low=1)
    seed: int = option(0, "names the problems of a procedural task, apart from the run's seed", low=0)
    median_steps: float = option(3.0, "division: median number of steps of a response", low=1)
    sigma: float = option(1.1, "division: deviation of the logarithm of the steps, the heaviness of the tail", low=0, high=3)
    max_steps: int = option(32, "division: most steps of a response", low=1)
    max_dividend: int = option(99, "division: largest dividend", low=5)
    max_divisor: int = option(33, "division: largest divisor", low=3)
    slip_rate: float = option(0.12, "division: share of wrong steps in the worked examples", low=0, below=1)
    operations: tuple[str, ...] = option(("+",), "arithmetic: what is asked", choices=("+", "-", "*"))
    low: int = option(1, "arithmetic: smallest operand", low=0)
    high: int = option(9, "arithmetic: largest operand", low=1)
    answer_mode: str = option(
        "flexible",
        "arithmetic, gsm8k: which answers count, the `####` line alone or any usual style",
        choices=("strict", "flexible"),
    )
    reward_model: str = option(
        "", "folder of experiments.reward_model whose score is the reward of training; evaluation keeps the task's own"
    )
    max_prompt_tokens: int = option(256, "prompts longer than this are an error, never cut", low=1)
    reward_timeout: float = option(10.0, "seconds after which the scoring of one response is stopped and counted", above=0)
    reward_workers: int = option(1, "worker processes that score responses; 0 scores in this process, without time-outs", low=0)


@dataclasses.dataclass(frozen=True)
class Model:
    """The policy. With `source=embedded` the sizes below apply; otherwise they come with the weights."""

    source: str = option("embedded", "`embedded` (small, from scratch), `smollm2`, or the path of a weights folder or file")
    family: str = option("llama", "architecture of the embedded model", choices=FAMILIES)
    num_layers: int = option(4, "decoder layers", low=1)
    hidden_size: int = option(128, "channels of the residual stream", low=8)
    intermediate_size: int = option(384, "channels inside the MLP", low=8)
    num_heads: int = option(4, "query heads", low=1)
    num_kv_heads: int = option(2, "key-value heads; divides num_heads", low=1)
    head_dim: int = option(32, "channels of a head; even", low=2)
    tie_embeddings: bool = option(True, "the output projection is the embedding table")
    max_positions: int = option(1024, "longest context, in tokens", low=2)
    init_std: float = option(0.02, "standard deviation of fresh weight matrices", above=0)
    dtype: str = option(
        "float32",
        "activations and served weights; the learner's master weights are always float32",
        choices=("float32", "bfloat16"),
    )


@dataclasses.dataclass(frozen=True)
class Train:
    """Sizes of the main loop, in optimizer-independent units."""

    steps: int = option(40, "rollout batches to learn from", low=0)
    prompts_per_step: int = option(8, "prompts of one rollout batch", low=1)
    group_size: int = option(8, "responses to each prompt", low=1)
    max_new_tokens: int = option(256, "response budget in tokens", low=1)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The law of training rollouts. Filters would bias the ratio and are refused here; evaluation has its own."""

    temperature: float = option(1.0, "divides the logits", above=0)
    top_k: int = option(0, "keep the k likeliest tokens; 0 keeps all", low=0)
    top_p: float = option(1.0, "keep the smallest set of this mass; 1 keeps all", above=0, high=1)
    min_p: float = option(0.0, "drop tokens below this share of the likeliest; 0 keeps all", low=0, below=1)
    reuse_noise_across_epochs: bool = option(
        False,
        "a prompt's samples get the noise of its first visit again, so history drafts hold unless the policy changed. Biased "
        "towards what was reinforced: once the policy was trained on a response, its noise is no longer fresh. For research",
    )


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Held-out prompts, before training, every so often, and after."""

    every: int = option(0, "training steps between evaluations; 0 evaluates only before and after", low=0)
    samples: int = option(1, "responses to each held-out prompt", low=1)
    temperature: float = option(1.0, "divides the logits; 0 takes the likeliest token", low=0)
    top_k: int = option(0, "keep the k likeliest tokens; 0 keeps all", low=0)
    top_p: float = option(1.0, "keep the smallest set of this mass; 1 keeps all", above=0, high=1)
    min_p: float = option(0.0, "drop tokens below this share of the likeliest; 0 keeps all", low=0, below=1)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The engine: which strategies it may use and which shapes it compiles."""

    strategies: tuple[str, ...] = option(
        ("off", "ngram-d4", "eagle-d2", "eagle-d4", "eagle-d6"),
        "arms, each `off`, `<drafter>-d<depth>` or a tree `eagle-d<depth>-w<width>-v<verify tokens>`, with a drafter of "
        + ", ".join(rules.DRAFTERS)
        + "; `off` must be one",
    )
    verification: str = option(
        "coupled", "`coupled`: the same tokens as without speculation; `rejection`: the same law", choices=VERIFICATIONS
    )
    max_batch: int = option(64, "requests decoded at once", low=1)
    batch_buckets: tuple[int, ...] = option(
        (), "batch sizes that are compiled, ascending; the last is max_batch. Empty: powers of two up to max_batch", low=1
    )
    cache_bucket: int = option(64, "cache capacities are multiples of this many tokens", low=1)
    rounds_per_launch: int = option(16, "decode rounds between two looks of the host", low=1)
    admission: str = option(
        "arrival",
        "order in which requests get a row: `arrival`, or `longest_first` by the lengths their prompts had before",
        choices=ADMISSIONS,
    )
    prefill_bucket: int = option(32, "prompts are padded to multiples of this many tokens", low=1)
    prefill_chunk: int = option(
        0, "longest piece of a prompt computed between two launches; 0: the whole prompt at once", low=0
    )
    replay_arms: str = option("", "arms.jsonl of an earlier run, whose choices are repeated instead of asking the bandit")


@dataclasses.dataclass(frozen=True)
class Bandit:
    """Who picks the strategy of the next launch."""

    name: str = option(
        "goodput",
        "`goodput`: acceptance learnt once for all arms, times measured latencies; `beg`: TLT's bucketed epsilon-greedy; "
        "`beg_static`: the same as published code ships it; `ucb`, `thompson`, `exp3`: over tokens per second; "
        "`fixed`: always `arm`",
        choices=BANDITS,
    )
    arm: str = option("off", "the strategy that `fixed` runs; one of rollout.strategies")
    thresholds: tuple[int, ...] = option(
        (),
        "beg: first batch size of each bucket, starting at 1, one for each distinct number of verify tokens. "
        "Empty: 1, 3, 6, 12, …",
        low=1,
    )
    epsilon: float = option(0.1, "beg: share of launches that try a random arm", low=0, high=1)
    window: int = option(64, "beg: launches remembered for each arm and bucket; ucb: for each bucket", low=1)
    exploration: float = option(0.005, "goodput: share of the time that exploration may be expected to lose", low=0, below=1)
    reset: bool = option(
        False, "on resume, start afresh where the saved controller chose among other arms, instead of refusing"
    )


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Drafters and how the learned one is trained along with the policy."""

    optimizer: str = option(
        "adamw",
        "the eagle drafter's own, of learner.optimizer; `muon` learns most a step and takes the longest steps",
        choices=OPTIMIZERS,
    )
    learning_rate: float = option(1e-3, "its step size", above=0)
    warmup_steps: int = option(0, "updates of linear warm-up", low=0)
    weight_decay: float = option(0.0, "decoupled weight decay", low=0)
    max_grad_norm: float = option(1.0, "clip the drafter's gradient to this norm", above=0)
    feature_weight: float = option(1.0, "weight of the smooth-L1 loss on hidden states", low=0)
    token_weight: float = option(0.1, "weight of the soft cross-entropy on token laws", low=0)
    overlap_weight: float = option(0.0, "weight of the total variation distance between token laws", low=0)
    depths: int = option(1, "draft depths trained: 1 on true hidden states alone, more on predictions fed back", low=1, high=16)
    depth_decay: float = option(0.8, "each further depth counts this times the one before", above=0, high=1)
    importance_weights: str = option(
        "none",
        "how responses of an earlier policy are weighted: by `token` or `prefix` ratios of the current law over theirs",
        choices=IMPORTANCE_WEIGHTS,
    )
    importance_cap: float = option(2.0, "no such weight is larger", above=0)
    when: str = option(
        "joint",
        "when the eagle drafter learns during RL: `joint`ly with every policy update; `on_demand`: likewise, but only while "
        "measured acceptance is down; `spot`: on devices whose share of the rollout has ended (on one device after the rollout), "
        "from hidden states that verify passes left; `off`: never. A warm start trains it whatever stands here",
        choices=ADAPTING,
    )
    fall: float = option(
        0.1, "on_demand: acceptance that falls by more than this share of its best starts training", above=0, high=1
    )
    spot_groups: int = option(1, "spot: devices that a rollout is spread over, prompts dealt out in turn", low=1)
    spot_steps: int = option(0, "spot on one device: training steps after each rollout", low=0)
    spot_rows: int = option(2, "spot: packed rows of a training step; a rollout's end waits for one step at most", low=1)
    buffer_megabytes: int = option(256, "spot: hidden states kept, of this rollout and the one before", low=1)
    save_every: int = option(0, "steps between saves of the drafter alone, to workdir/drafter; 0: none", low=0)
    ngram_max: int = option(3, "longest suffix that prompt lookup searches for", low=1)
    ngram_min: int = option(1, "shortest suffix that prompt lookup searches for; at most ngram_max", low=1)
    path: str = option(
        "", "folder of experiments.drafter_warmup: the eagle drafter starts from its weights, not from random ones"
    )
    history_max: int = option(8, "longest suffix that history searches for", low=1)
    history_min: int = option(2, "shortest suffix that history searches for; at most history_max", low=1)
    history_reference: int = option(1024, "tokens of earlier responses that a row can look things up in", low=1)
    history_tokens: int = option(1 << 20, "tokens of earlier responses kept altogether; the oldest go first", low=1)
    history_responses: int = option(16, "earlier responses kept of one prompt", low=1)
    merged_min_match: int = option(4, "merged: looked-up drafts are taken where at least this many tokens match", low=1)
    model: str = option("", "weights of the independent draft model, where a strategy uses it: `smollm2` or a path")


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Supervised updates on the task's worked examples before RL; they train the eagle drafter too."""

    steps: int = option(0, "updates; 0 skips the warm start", low=0)
    batch_size: int = option(64, "examples of an update", low=1)
    learning_rate: float = option(
        1e-3, "AdamW's peak step size, with linear warm-up over a tenth of the steps and cosine decay", above=0
    )
    examples: int = option(4096, "distinct worked examples, none of them an evaluation prompt", low=1)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """When the whole state is saved. The last step and a SIGTERM always save."""

    every: int = option(10, "steps between saves, warm-start updates counted too", low=1)
    keep: int = option(2, "latest checkpoints that stay on disk", low=1)


@dataclasses.dataclass(frozen=True)
class Log:
    """What a run writes beside checkpoints."""

    tensorboard: bool = option(True, "write TensorBoard event files to workdir/tensorboard")
    samples_per_step: int = option(16, "rollouts of each step that go to samples.jsonl; 0 writes none", low=0)
    report: bool = option(True, "write report.html at the end")
    trace: bool = option(False, "write trace.json at the end: who worked when, for ui.perfetto.dev")
    compare_repeats: int = option(
        3, "timed repeats, each with and without speculation, of the closing comparison; 0 skips it", low=0
    )


@dataclasses.dataclass(frozen=True)
class Runtime:
    """The machine, and how generation and learning share it."""

    mode: str = option(
        "sync",
        "`sync`: generate, then learn; `lagged`: the same, each batch by the policy `lag` batches ago (deterministic, one "
        "device); `overlap`: at once, on devices of their own; `in_flight`: likewise, and new weights enter running requests",
        choices=MODES,
    )
    lag: int = option(1, "lagged: policies that a batch is old when it is learnt from; 0 equals sync", low=0)
    max_staleness: int = option(
        1, "overlap, in_flight: no token is learnt from that is older than this many policies; one batch makes one", low=0
    )
    queue: int = option(2, "overlap, in_flight: finished batches that may wait before the generator pauses", low=1)
    in_flight_cache: str = option(
        "keep", "in_flight: running requests keep their cache when weights change, or have it computed anew", choices=CACHES
    )
    pin_versions: bool = option(
        False,
        "overlap: each batch by exactly the policy max_staleness batches ago, so that runs repeat bit for bit; else the newest",
    )
    generator_devices: tuple[int, ...] = option(
        (), "overlap, in_flight: device that generates, as numbers of jax.devices(). Empty: the one after the learner's", low=0
    )
    learner_devices: tuple[int, ...] = option((), "devices that learn, learner.devices of them. Empty: the first ones", low=0)
    heartbeat_timeout: float = option(
        600.0, "seconds without a sign of life (compiling counts) after which the run ends with an error", above=0
    )
    allow_uncorrected: bool = option(False, "allow a loss without importance correction where data are stale")
    refresh: str = option(
        "off",
        "stale batches are made current before they are learnt from (verified with their own noise and continued where they "
        "differ): `off`, `always`, or `auto` by the disagreement and cost of earlier batches",
        choices=REFRESHES,
    )
    refresh_lag: int = option(1, "refresh: batches at least this many policies old", low=1)
    refresh_above: float = option(
        0.05,
        "refresh=auto: where at least this share of tokens is expected to differ; importance weights below",
        above=0,
        high=1,
    )
    refresh_cost: float = option(
        1.0, "refresh=auto: not where it took more than this many times the seconds of generating a batch", above=0
    )
    compilation_cache: str = option(
        "default",
        "JAX's persistent compilation cache: a folder, `default` (~/.cache/adrl_jax/xla), `workdir` "
        "(below the workdir), or `off`",
    )


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Who computes verify passes and the learner's log-probs."""

    implementation: str = option(
        "auto",
        "`xla`; the Pallas kernels `pallas_tpu`, `pallas_gpu`, or `interpret` (those for TPU as plain operations, for tests); "
        "`auto` takes what suits this machine and logs its choice once",
        choices=IMPLEMENTATIONS,
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: int = option(0, "names all randomness of the run", low=0, high=2**31 - 1)
    task: Task = dataclasses.field(default_factory=Task)
    model: Model = dataclasses.field(default_factory=Model)
    train: Train = dataclasses.field(default_factory=Train)
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)
    rollout: Rollout = dataclasses.field(default_factory=Rollout)
    bandit: Bandit = dataclasses.field(default_factory=Bandit)
    drafter: Drafter = dataclasses.field(default_factory=Drafter)
    learner: Learner = dataclasses.field(default_factory=Learner)
    warm_start: WarmStart = dataclasses.field(default_factory=WarmStart)
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
    log: Log = dataclasses.field(default_factory=Log)
    kernels: Kernels = dataclasses.field(default_factory=Kernels)
    runtime: Runtime = dataclasses.field(default_factory=Runtime)


def get_config() -> config_dict.ConfigDict:
    """All defaults, for config files and notebooks to edit."""
    return schema.defaults(Config)


def freeze(config: Any) -> Config:
    """Checks a ConfigDict (or nested mapping, or `Config`) and returns the frozen config.

    Raises:
        ConfigError: the first field or rule that does not hold.
    """
    c = config if isinstance(config, Config) else schema.build(Config, config)
    rules.check(c)
    return c


def save(config: Config, path: Path) -> None:
    path.write_text(json.dumps(schema.as_dict(config), indent=2) + "\n")


def load(path: Path) -> Config:
    """A config written by `save`, equal to the one that was saved."""
    return schema.build(Config, json.loads(path.read_text()))
