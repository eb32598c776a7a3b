"""The learner's part of a training config. Presets of whole algorithms are in `experiments.presets`."""

import dataclasses

from adrl_jax.learner.aggregation import AGGREGATIONS
from adrl_jax.learner.kl import ESTIMATORS
from adrl_jax.learner.row import OLD_LOG_PROBS
from adrl_jax.learner.shaping import EOS_RULES
from adrl_jax.learner.surrogates import SURROGATES
from adrl_jax.learner.weights import MASKS, WEIGHTS
from experiments.schema import option

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "batch", "optimal", "gae", "none")
OPTIMIZERS = ("adamw", "adafactor", "muon")


@dataclasses.dataclass(frozen=True)
class Learner:
    """Loss, rewards and optimizer of the policy."""

    surrogate: str = option(
        "ppo_clip",
        "what is minimised a token, given the ratio of the current to the old policy: `ppo_clip`, `cispo`, `gspo`, `prox_rloo`, "
        "`topr`, `ratio` (unclipped), `reinforce` (no ratio); of pairs or groups `online_dpo`, `ipo`, `copg`; `best_of_n`",
        choices=tuple(SURROGATES),
    )
    advantage: str = option(
        "grpo",
        "`grpo`: (r - mean) / std in the group; `dr_grpo`: r - mean; `rloo`: leave-one-out baseline; `batch`: r - mean, over the "
        "batch's deviation; `optimal`: baseline of least variance off-policy; `gae`: a value model; `none`: the surrogate's own",
        choices=ADVANTAGES,
    )
    aggregation: str = option(
        "token",
        "the loss is a mean over tokens, over sequences of their token means (`sequence`) or sums (`sequence_sum`), over groups "
        "of their token means, or (`constant`, Dr. GRPO) a sum over sequences x train.max_new_tokens",
        choices=AGGREGATIONS,
    )
    old_log_probs: str = option(
        "behaviour",
        "the old policy of the ratio: `behaviour`, the one that sampled; `recompute`, the learner's when the batch arrived (a "
        "pass more); `interpolate`, between the sampling one and the current one by age",
        choices=OLD_LOG_PROBS,
    )
    clip_low: float = option(0.2, "the ratio is clipped below at 1 - this", above=0, high=1)
    clip_high: float = option(0.2, "the ratio is clipped above at 1 + this", above=0)
    dual_clip: float = option(0.0, "ppo_clip: bad tokens lose at most this times -advantage; > 1, 0 for no bound", low=0)
    weight: str = option(
        "none",
        "importance weight from the policy that sampled to the old one (without an old one of its own, to the current one): by "
        "token, by sequence, its geometric mean, or `vespo`",
        choices=("none", *WEIGHTS),
    )
    weight_low: float = option(0.0, "the weight is raised to at least this", low=0)
    weight_high: float = option(2.0, "the weight is truncated at this; 0 for no bound", low=0)
    mask: str = option(
        "none",
        "what is left out: ratios outside a band by token, sequence or its geometric mean; `opsm`, bad sequences far off-policy; "
        "`probability`, tokens that moved far enough; `m2po`, the largest log-ratios of a batch",
        choices=("none", *MASKS),
    )
    mask_low: float = option(0.5, "token, sequence, geometric: smallest ratio kept; 0 for no bound", low=0)
    mask_high: float = option(2.0, "token, sequence, geometric: largest ratio kept; 0 for no bound", low=0)
    mask_threshold: float = option(0.0, "opsm, probability, m2po: the limit; 0 takes the published one", low=0)
    ess_base: float = option(
        0.0,
        "the learning rate shrinks with sqrt(ESS / this) where the effective share of responses is below this; 0: never",
        low=0,
        high=1,
    )
    beta: float = option(0.1, "online_dpo, ipo, copg: strength of the implicit KL to the reference", above=0)
    ties: str = option(
        "skip",
        "online_dpo, ipo, best_of_n: groups with equal rewards are skipped, or the first response counts as better",
        choices=("skip", "first"),
    )
    entropy_coef: float = option(0.0, "entropy bonus, in units of the loss a nat", low=0)
    kl_coef: float = option(0.0, "weight of the KL to the reference model; 0 needs no reference", low=0)
    kl_in: str = option("loss", "where that KL goes", choices=("loss", "reward"))
    kl_estimator: str = option("k3", "its estimator, see adrl_jax.learner.kl for which gradient each has", choices=ESTIMATORS)
    kl_correction: bool = option(False, "in the loss: times the ratio to the policy that sampled, which makes it unbiased")
    reference_every: int = option(0, "steps after which the reference becomes the current policy; 0 keeps it frozen", low=0)
    eos_rule: str = option(
        "none", "responses that did not end: score `replace`d by -eos_penalty, or eos_penalty `subtract`ed", choices=EOS_RULES
    )
    eos_penalty: float = option(0.0, "what a missing end costs", low=0)
    overlong_margin: int = option(0, "tokens before train.max_new_tokens in which a response begins to cost", low=0)
    overlong_penalty: float = option(0.0, "what it costs at train.max_new_tokens", low=0)
    drop_truncated: bool = option(False, "responses that did not end are left out, of baselines too")
    drop_zero_variance: bool = option(False, "groups with equal rewards are left out of the batch, and of its token count")
    max_refills: int = option(
        0, "dynamic sampling: draw up to this many more rounds of prompts for groups with equal rewards, else stop", low=0
    )
    gamma: float = option(1.0, "gae: discount", above=0, high=1)
    gae_lambda: float = option(0.95, "gae: lambda", low=0, high=1)
    bootstrap_truncated: bool = option(True, "gae: a response cut off goes on being worth its last value, else 0")
    whiten: bool = option(True, "gae: advantages get mean 0 and deviation 1 over the tokens of a rollout batch")
    value_init: str = option("policy", "gae: the value model starts as a copy of `policy`, or from a reward model's folder")
    value_learning_rate: float = option(1e-4, "gae: AdamW's step size of the value model", above=0)
    value_clip: float = option(0.2, "gae: how far a value may move in one batch; 0 for no bound", low=0)
    optimizer: str = option("adamw", "the policy's optimizer; the value model keeps AdamW", choices=OPTIMIZERS)
    learning_rate: float = option(1e-5, "the peak step size", above=0)
    warmup_steps: int = option(0, "optimizer steps of linear warm-up", low=0)
    schedule: str = option("constant", "after the warm-up", choices=("constant", "cosine", "linear"))
    schedule_unit: str = option(
        "update",
        "the schedule counts optimizer steps, or rollout batches, each with the rate after it (the paper's reference code)",
        choices=("update", "batch"),
    )
    beta1: float = option(0.9, "decay of the first moment (muon: of the momentum)", low=0, below=1)
    beta2: float = option(0.95, "decay of the second moment", low=0, below=1)
    weight_decay: float = option(0.0, "decoupled weight decay", low=0)
    max_grad_norm: float = option(1.0, "clip the gradient to this norm; 0 never clips", low=0)
    max_nonfinite: int = option(3, "updates in a row that may be skipped for a loss or gradient that is not finite", low=0)
    minibatches: int = option(1, "optimizer steps on one rollout batch; divides train.prompts_per_step", low=1)
    epochs: int = option(1, "how often a rollout batch is learnt from", low=1)
    episodes: int = option(0, "episodes an optimizer step, instead of train.prompts_per_step; 0 leaves that alone", low=0)
    episode_unit: str = option(
        "prompt",
        "an episode is a prompt, or one completion (the paper's trainers differ in this)",
        choices=("prompt", "completion"),
    )
    lora_rank: int = option(0, "train adapters of this rank instead of all weights; 0 trains all", low=0)
    lora_alpha: float = option(16.0, "adapters count this / rank", above=0)
    layout: str = option(
        "prefix_shared",
        "`prefix_shared` computes a group's prompt once; `plain` once a response",
        choices=("prefix_shared", "plain"),
    )
    row_length: int = option(0, "tokens of a packed row; 0 takes the cheapest by a cost model of the chosen policy", low=0)
    row_multiple: int = option(
        1,
        "rows of a batch are rounded up to a multiple of this; more compiles fewer programs, and empty rows are skipped",
        low=1,
    )
    target_multiple: int = option(64, "response tokens of a row are rounded up to a multiple of this, likewise", low=1)
    microbatch_rows: int = option(1, "packed rows whose gradient is computed at once on each device", low=1)
    remat: bool = option(False, "recompute activations in the backward pass to save memory")
    vocab_block: int = option(0, "ids whose logits exist at one time; 0 chooses from the number of targets", low=0)
    devices: int = option(1, "devices that the packed rows are spread over", low=1)
