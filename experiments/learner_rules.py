"""Rules between the learner's fields, and between them and the rest of a run. Each error names both fields."""

from typing import Any

from adrl_jax.learner.loss_config import Conflict, LossConfig
from adrl_jax.learner.surrogates import SURROGATES
from adrl_jax.learner.weights import WEIGHTS
from experiments.learner_config import Learner
from experiments.schema import ConfigError, options

# A field that does something only where another one has one of these values.
_READ_ONLY_WITH: dict[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(
        ("gamma", "gae_lambda", "bootstrap_truncated", "whiten", "value_init", "value_learning_rate", "value_clip"),
        ("advantage", ("gae",)),
    ),
    "ties": ("surrogate", ("online_dpo", "ipo", "best_of_n")),
    "schedule_unit": ("schedule", ("cosine", "linear")),
    "beta2": ("optimizer", ("adamw", "muon")),
    "beta1": ("optimizer", ("adamw", "muon")),
    "lora_alpha": ("lora_rank", ()),
    "eos_penalty": ("eos_rule", ("replace", "subtract")),
    "overlong_margin": ("overlong_penalty", ()),
    "kl_in": ("kl_coef", ()),
    "episode_unit": ("episodes", ()),
}


def fault(field: str, value: Any, other: str, other_value: Any, reason: str) -> ConfigError:
    return ConfigError(f"{field}={value!r} is not legal with {other}={other_value!r}: {reason}")


def loss_config(c: Any) -> LossConfig:
    """The policy loss of a config.

    Raises:
        ConfigError: two of its fields do not go together.
    """
    x = c.learner
    in_loss = x.kl_in == "loss"
    defaults = {name: options(Learner)[name].default for name in ("kl_estimator", "kl_correction")}
    try:
        return LossConfig(
            clip_low=x.clip_low,
            clip_high=x.clip_high,
            aggregation=x.aggregation,
            constant_length=c.train.max_new_tokens if x.aggregation == "constant" else None,
            entropy_coef=x.entropy_coef,
            surrogate=x.surrogate,
            old_log_probs=x.old_log_probs,
            dual_clip=x.dual_clip,
            weight=x.weight,
            weight_low=x.weight_low,
            weight_high=x.weight_high,
            mask=x.mask,
            mask_low=x.mask_low,
            mask_high=x.mask_high,
            mask_threshold=x.mask_threshold,
            beta=x.beta,
            kl_coef=x.kl_coef if in_loss else 0.0,
            kl_estimator=x.kl_estimator if in_loss else defaults["kl_estimator"],
            kl_correction=x.kl_correction if in_loss else defaults["kl_correction"],
        )
    except Conflict as e:
        raise fault(f"learner.{e.field}", e.value, f"learner.{e.other}", e.other_value, e.reason) from None
    except ValueError as e:
        raise ConfigError(f"learner.{e}") from None


def prompts_per_step(c: Any) -> int:
    """Prompts of a rollout batch: as given, or from `learner.episodes` an optimizer step.

    Raises:
        ConfigError: completions do not fill groups.
    """
    x = c.learner
    if not x.episodes:
        return c.train.prompts_per_step
    size = c.train.group_size if x.episode_unit == "completion" else 1
    if x.episodes % size:
        raise fault("learner.episodes", x.episodes, "train.group_size", size, "completions must fill whole groups")
    return x.episodes // size * x.minibatches


def stale(c: Any) -> bool:
    """Whether the run's mode learns from data of earlier batches' policies."""
    r = c.runtime
    mode = getattr(r, "mode", "sync")
    return mode != "sync" and (r.lag if mode == "lagged" else r.max_staleness) > 0


def corrected(c: Any) -> bool:
    """Whether the loss looks at the law that sampled, or is off-policy as it stands (pairs and groups, best of n)."""
    loss = loss_config(c)
    against_behaviour = loss.parts.has_ratio and loss.old_log_probs == "behaviour"
    return against_behaviour or loss.weight != "none" or loss.parts.level == "group" or loss.parts.advantages == "best"


def describe_loss(c: Any) -> str:
    """The fields that `corrected` looks at, with their values."""
    return ", ".join(f"learner.{name}={getattr(c.learner, name)}" for name in ("surrogate", "weight", "old_log_probs"))


def corrections() -> str:
    """What would make `corrected` true, in words."""
    off_policy = [k for k, s in SURROGATES.items() if s.has_ratio or s.level == "group" or s.advantages == "best"]
    return f"learner.weight of {', '.join(WEIGHTS)}, or learner.surrogate of {', '.join(off_policy)} with learner.old_log_probs=behaviour"


def check(c: Any) -> None:
    """Raises ConfigError for the first rule that does not hold."""
    loss = loss_config(c)
    _check_unread(c)
    _check_advantage(c, loss)
    _check_rewards(c)
    _check_reference(c, loss)
    x = c.learner
    if stale(c) and x.old_log_probs != "behaviour" and x.weight == "none":
        raise fault(
            "learner.old_log_probs",
            x.old_log_probs,
            "learner.weight",
            x.weight,
            f"runtime.mode={c.runtime.mode} learns from earlier policies, and a ratio to recomputed log-probs hides that; choose a "
            "weight, or behaviour",
        )
    if x.lora_rank and c.warm_start.steps:
        raise fault("learner.lora_rank", x.lora_rank, "warm_start.steps", c.warm_start.steps, "a warm start trains all weights")
    if loss.keeps_groups and x.row_length:
        prompts = 1 if x.layout == "prefix_shared" else c.train.group_size
        longest = prompts * c.task.max_prompt_tokens + c.train.group_size * c.train.max_new_tokens
        if loss.parts.advantages == "pair":
            longest = min(2, prompts) * c.task.max_prompt_tokens + 2 * c.train.max_new_tokens
        if x.row_length < longest:
            raise fault(
                "learner.row_length",
                x.row_length,
                "learner.aggregation",
                x.aggregation,
                f"the responses of a group must fit into one row: 0, or at least {longest}",
            )


def _check_unread(c: Any) -> None:
    known = options(Learner)
    for name, (other, values) in _READ_ONLY_WITH.items():
        value, chosen, default = getattr(c.learner, name), getattr(c.learner, other), known[name].default
        acts = chosen in values if values else bool(chosen)
        if not acts and value != default:
            need = f"one of {', '.join(values)}" if values else "> 0"
            raise fault(
                f"learner.{name}",
                value,
                f"learner.{other}",
                chosen,
                f"nothing reads it then; leave it at {default!r}, or make learner.{other} {need}",
            )


def _check_advantage(c: Any, loss: LossConfig) -> None:
    x, own = c.learner, loss.parts.advantages
    names = ("learner.advantage", x.advantage, "learner.surrogate", x.surrogate)
    if (own in ("pair", "reward", "best")) != (x.advantage == "none"):
        raise fault(*names, "it compares rewards by itself: none" if x.advantage != "none" else "it multiplies an advantage")
    if own == "response" and x.advantage == "gae":
        raise fault(*names, "it takes one advantage a response, and a value model gives one a token")
    if x.advantage != "gae" and c.train.group_size < 2:
        what = f"learner.advantage={x.advantage}" if own in ("any", "response") else f"learner.surrogate={x.surrogate}"
        raise ConfigError(
            f"train.group_size={c.train.group_size} is not legal: {what} compares the responses of a group, so it needs at least 2"
        )
    if x.advantage == "gae" and (x.drop_zero_variance or x.max_refills):
        field = "drop_zero_variance" if x.drop_zero_variance else "max_refills"
        raise fault(
            f"learner.{field}", getattr(x, field), *names[:2], "a value model learns from groups with equal rewards too"
        )
    if x.drop_zero_variance and own in ("pair", "best"):
        raise fault("learner.drop_zero_variance", True, *names[2:], "it leaves ties out by itself, see learner.ties")
    if x.max_refills and c.rollout.replay_arms:
        raise fault(
            "learner.max_refills", x.max_refills, "rollout.replay_arms", c.rollout.replay_arms, "arms are recorded by step"
        )
    if x.max_refills and stale(c):
        raise fault(
            "learner.max_refills", x.max_refills, "runtime.mode", c.runtime.mode, "refilling waits for rewards: sync only"
        )


def _check_rewards(c: Any) -> None:
    x = c.learner
    if x.overlong_penalty and not 0 < x.overlong_margin <= c.train.max_new_tokens:
        raise fault(
            "learner.overlong_margin",
            x.overlong_margin,
            "learner.overlong_penalty",
            x.overlong_penalty,
            f"must be between 1 and train.max_new_tokens={c.train.max_new_tokens}",
        )
    if x.eos_rule != "none" and not x.eos_penalty:
        raise fault("learner.eos_penalty", x.eos_penalty, "learner.eos_rule", x.eos_rule, "it must be > 0")
    if x.drop_truncated and (x.eos_rule != "none" or x.overlong_penalty):
        other = "eos_rule" if x.eos_rule != "none" else "overlong_penalty"
        raise fault(
            f"learner.{other}",
            getattr(x, other),
            "learner.drop_truncated",
            True,
            "what is left out cannot be punished; choose one",
        )
    if x.kl_in == "reward" and x.kl_correction:
        raise fault("learner.kl_correction", True, "learner.kl_in", "reward", "a reward has no gradient to correct")
    if not x.kl_coef:
        for name in ("kl_estimator", "kl_correction"):
            default = options(Learner)[name].default
            if getattr(x, name) != default:
                raise fault(f"learner.{name}", getattr(x, name), "learner.kl_coef", x.kl_coef, "without a KL nothing reads it")


def _check_reference(c: Any, loss: LossConfig) -> None:
    x = c.learner
    if x.reference_every and not needs_reference(c, loss):
        raise fault(
            "learner.reference_every",
            x.reference_every,
            "learner.kl_coef",
            x.kl_coef,
            "without a reference nothing is refreshed",
        )


def needs_reference(c: Any, loss: LossConfig | None = None) -> bool:
    """Whether the run keeps a reference model."""
    loss = loss_config(c) if loss is None else loss
    return loss.needs_reference or (c.learner.kl_coef > 0 and c.learner.kl_in == "reward")
