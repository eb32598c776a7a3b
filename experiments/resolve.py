"""From settings to the small frozen dataclasses of the rooms. Nothing here touches a file or a device."""

from adrl_jax.drafter.loss import DrafterLossConfig
from adrl_jax.learner.optimizer import OptimizerConfig
from adrl_jax.models import families
from adrl_jax.models.families import ModelConfig
from adrl_jax.rollout.engine import EngineConfig
from adrl_jax.runtime.choice import RefreshConfig
from adrl_jax.runtime.experience import ExperienceConfig, GaeConfig
from adrl_jax.runtime.parts import LoopConfig
from adrl_jax.types import SamplingParams
from experiments import learner_rules, rules
from experiments.config import Config


def model_config(c: Config, vocab_size: int) -> ModelConfig:
    """The embedded model: the family's own traits, our sizes, a vocabulary of the tokenizer's size."""
    m = c.model
    return families.from_hf(
        {
            "model_type": m.family,
            "vocab_size": vocab_size,
            "hidden_size": m.hidden_size,
            "intermediate_size": m.intermediate_size,
            "num_hidden_layers": m.num_layers,
            "num_attention_heads": m.num_heads,
            "num_key_value_heads": m.num_kv_heads,
            "head_dim": m.head_dim,
            "max_position_embeddings": m.max_positions,
            "tie_word_embeddings": m.tie_embeddings,
        },
        m.dtype,
    )


def sampling(c: Config) -> SamplingParams:
    return SamplingParams(c.sampling.temperature, c.sampling.top_k, c.sampling.top_p, c.sampling.min_p)


def evaluation_sampling(c: Config) -> SamplingParams:
    e = c.evaluation
    return SamplingParams(e.temperature, e.top_k, e.top_p, e.min_p)


def engine_config(c: Config, eos_ids: tuple[int, ...], valid_vocab: int) -> EngineConfig:
    r = c.rollout
    return EngineConfig(
        seed=c.seed,
        eos_ids=eos_ids,
        valid_vocab=valid_vocab,
        strategies=rules.strategies(c),
        max_batch=r.max_batch,
        batch_buckets=rules.batch_buckets(c),
        cache_bucket=r.cache_bucket,
        rounds_per_launch=r.rounds_per_launch,
        verification=r.verification,
        prefill_bucket=r.prefill_bucket,
        prefill_chunk=r.prefill_chunk or None,
        admission=r.admission,
        kernels=c.kernels.implementation,
    )


def experience_config(c: Config) -> ExperienceConfig:
    """What happens between scoring and learning."""
    x = c.learner
    gae = GaeConfig(x.gamma, x.gae_lambda, x.bootstrap_truncated, x.whiten) if x.advantage == "gae" else None
    in_reward = x.kl_in == "reward"
    return ExperienceConfig(
        loss=learner_rules.loss_config(c),
        max_new_tokens=c.train.max_new_tokens,
        minibatches=x.minibatches,
        epochs=x.epochs,
        eos_rule=x.eos_rule,
        eos_penalty=x.eos_penalty,
        overlong_margin=x.overlong_margin,
        overlong_penalty=x.overlong_penalty,
        drop_truncated=x.drop_truncated,
        drop_zero_variance=x.drop_zero_variance,
        reward_kl_coef=x.kl_coef if in_reward else 0.0,
        reward_kl_estimator=x.kl_estimator,
        reference_every=x.reference_every,
        baseline_weights=x.advantage == "optimal",
        gae=gae,
    )


def optimizer_config(c: Config) -> OptimizerConfig:
    x = c.learner
    steps = c.train.steps * x.minibatches * x.epochs
    return OptimizerConfig(
        learning_rate=x.learning_rate,
        schedule=x.schedule,
        warmup_steps=x.warmup_steps,
        total_steps=max(steps, x.warmup_steps + 1),
        b1=x.beta1,
        b2=x.beta2,
        weight_decay=x.weight_decay,
        clip_norm=x.max_grad_norm or None,
        name=x.optimizer,
        steps_per_unit=x.minibatches * x.epochs if x.schedule_unit == "batch" else 1,
    )


def value_optimizer_config(c: Config) -> OptimizerConfig:
    x = c.learner
    return OptimizerConfig(learning_rate=x.value_learning_rate, clip_norm=x.max_grad_norm or None)


def warm_optimizer_config(c: Config) -> OptimizerConfig:
    steps = max(c.warm_start.steps, 2)
    return OptimizerConfig(
        learning_rate=c.warm_start.learning_rate,
        schedule="cosine",
        warmup_steps=steps // 10,
        total_steps=steps,
        b1=c.learner.beta1,
        b2=c.learner.beta2,
        weight_decay=c.learner.weight_decay,
        clip_norm=c.learner.max_grad_norm or None,
    )


def drafter_optimizer_config(c: Config) -> OptimizerConfig:
    d = c.drafter
    return OptimizerConfig(
        learning_rate=d.learning_rate,
        warmup_steps=d.warmup_steps,
        weight_decay=d.weight_decay,
        clip_norm=d.max_grad_norm,
        name=d.optimizer,
    )


def drafter_loss_config(c: Config) -> DrafterLossConfig | None:
    """None where no strategy uses the trained drafter."""
    if not any(s.drafter in rules.LEARNED for s in rules.strategies(c)):
        return None
    d = c.drafter
    return DrafterLossConfig(
        d.feature_weight,
        d.token_weight,
        d.overlap_weight,
        depths=d.depths,
        depth_decay=d.depth_decay,
        importance_weights=d.importance_weights,
        importance_cap=d.importance_cap,
    )


def staleness_limit(c: Config) -> int:
    """Versions that data may be old when they are learnt from."""
    return {"sync": 0, "lagged": c.runtime.lag}.get(c.runtime.mode, c.runtime.max_staleness)


def loop_config(c: Config) -> LoopConfig:
    r = c.runtime
    return LoopConfig(
        seed=c.seed,
        steps=c.train.steps,
        prompts_per_step=learner_rules.prompts_per_step(c),
        group_size=c.train.group_size,
        max_new_tokens=c.train.max_new_tokens,
        sampling=sampling(c),
        reuse_noise=c.sampling.reuse_noise_across_epochs,
        reset_bandit=c.bandit.reset,
        max_nonfinite=c.learner.max_nonfinite,
        max_refills=c.learner.max_refills,
        warm_steps=c.warm_start.steps,
        evaluate_every=c.evaluation.every,
        eval_samples=c.evaluation.samples,
        eval_sampling=evaluation_sampling(c),
        checkpoint_every=c.checkpoint.every,
        checkpoints_kept=c.checkpoint.keep,
        samples_per_step=c.log.samples_per_step,
        compare_repeats=c.log.compare_repeats,
        tensorboard=c.log.tensorboard,
        report=c.log.report,
        updates_per_batch=c.learner.minibatches * c.learner.epochs,
        mode=r.mode,
        limit=staleness_limit(c),
        queue=r.queue,
        cache=r.in_flight_cache,
        pinned=r.pin_versions,
        silence_s=r.heartbeat_timeout,
        refresh=RefreshConfig(r.refresh, r.refresh_lag, r.refresh_above, r.refresh_cost),
        trace=c.log.trace,
    )
