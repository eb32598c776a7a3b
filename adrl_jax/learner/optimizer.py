"""The optimizer of policy or drafter: global-norm clip, then AdamW with a schedule in optimizer steps."""

import dataclasses

import jax
import optax

SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101).

    Attributes:
        learning_rate: the peak.
        schedule: after the warm-up: `constant`, or down to 0 at `total_steps` along a line or a half cosine.
        warmup_steps: optimizer steps of linear warm-up; step 0 has 1 / warmup_steps of the peak.
        total_steps: optimizer steps of the run; required unless the schedule is constant.
        weight_decay: decoupled, on matrices only (no norms, no biases).
        clip_norm: largest global gradient norm; None leaves gradients alone.
    """

    learning_rate: float = 1e-6
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0

    def __post_init__(self):
        if not 0 <= self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate={self.learning_rate!r} must be finite and >= 0")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps!r} must be >= 0")
        if self.schedule != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(
                f"schedule={self.schedule!r} needs total_steps > warmup_steps, got total_steps={self.total_steps!r}, "
                f"warmup_steps={self.warmup_steps!r}"
            )
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be in [0, 1)")
        if not self.eps > 0:
            raise ValueError(f"eps={self.eps!r} must be positive")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay!r} must be >= 0")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm!r} must be positive, or None for no clipping")


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Optimizer step (0 for the first) to learning rate."""
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "constant":
        main = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        main = optax.linear_schedule(peak, 0.0, config.total_steps - warmup)
    else:
        main = optax.cosine_decay_schedule(peak, config.total_steps - warmup)
    if not warmup:
        return main
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, warmup), main], [warmup])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Global-norm clip and AdamW; moments are float32 like the master weights."""
    adamw = optax.adamw(
        make_schedule(config),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params),
    )
    return adamw if config.clip_norm is None else optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
