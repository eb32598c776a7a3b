"""Training a drafter before RL, on responses of a policy that stands still.

The policy reads each response once; its hidden states are kept (4 H bytes a token, host memory), because reading them again
would cost many times what the drafter's own step does, and the drafter goes over them for several epochs. Nothing of the policy is
trained: it is not even differentiated.

Shapes: `M` rows, `T` tokens a row, `H` hidden size.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adrl_jax.drafter.loss import DrafterLossConfig, packed_drafter_loss
from adrl_jax.learner import packing
from adrl_jax.learner.attention import Reach, reach_of
from adrl_jax.learner.forward import Forward, ForwardConfig, hidden_states
from adrl_jax.learner.losses import Loss
from adrl_jax.learner.optimizer import keep_state
from adrl_jax.models.families import ModelConfig
from adrl_jax.speculation import eagle
from adrl_jax.types import PackedBatch, Rollout


class Lesson(NamedTuple):
    """One batch of packed rows and what the policy made of them; numpy leaves.

    Attributes:
        batch: its `log_probs` are those of the law that drew the tokens, at `temperature`.
        hidden: `[M, T, C]`, what the drafter reads of the policy (`eagle.Eagle.taps`), in the compute dtype.
        temperature: of the sampling law.
        reach: see `attention.reach_of`.
        log_probs: `[M, U]`, of the targets under the law of the policy that made `hidden`, where the batch's own are those of
            another policy (the one that drew them); None where they are the same.
        version: of the policy that made `hidden`.
    """

    batch: PackedBatch
    hidden: np.ndarray
    temperature: float
    reach: Reach
    log_probs: np.ndarray | None = None
    version: int = 0

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return int(self.batch.target_mask.sum())


class WarmupState(NamedTuple):
    """What training changes.

    Attributes:
        trained: float32 parameters, `eagle.split(…)[0]`.
        opt_state: of their optimizer.
        step: int32 `[]`, steps asked for.
        skipped: int32 `[]`, those of them whose loss or gradient was not finite and which changed nothing.
    """

    trained: Any
    opt_state: Any
    step: jax.Array
    skipped: jax.Array


def make_lessons(
    params: Any,
    config: ModelConfig,
    rollouts: Sequence[Rollout],
    *,
    rows: int,
    row_length: int,
    layout: str = "prefix_shared",
    seed: int = 0,
    on_batch: Callable[[int, int], None] | None = None,
) -> list[Lesson]:
    """Packs responses into batches of `rows` rows and runs the policy over them, once.

    Responses of one temperature stand together in a lesson. Rows are dealt out at random (by `seed`): packing sorts them by
    length.

    Args:
        params: the policy's, as the learner keeps them; the one that drew the rollouts.
        rollouts: at least one; their `log_probs` must be the policy's own, as the engine records them.
        row_length: T, at least the longest prompt + response.
        on_batch: called with (batches done, batches) after each.

    Raises:
        ValueError: no rollouts; filters cut the law they were drawn from; a rollout is longer than a row.
    """
    if not rollouts:
        raise ValueError("there are no rollouts to learn from")
    filtered = [i for i, r in enumerate(rollouts) if r.sampling.filtered or r.sampling.temperature <= 0]
    if filtered:
        raise ValueError(f"rollout {filtered[0]} was drawn with {rollouts[filtered[0]].sampling}: no law to learn from")
    run = jax.jit(hidden_states, static_argnames=("model_config", "reach"))
    packed = []
    for temperature in sorted({r.sampling.temperature for r in rollouts}):
        chosen = [r for r in rollouts if r.sampling.temperature == temperature]
        batch = packing.pack(chosen, [0.0] * len(chosen), row_length=row_length, layout=layout)
        filled = np.flatnonzero(batch.segment_ids.any(axis=1))
        order = np.random.default_rng([seed, len(packed)]).permutation(filled)
        reach = reach_of(batch)
        packed += [(temperature, reach, _rows(batch, order[i : i + rows], rows)) for i in range(0, len(order), rows)]
    lessons = []
    for done, (temperature, reach, batch) in enumerate(packed, 1):
        hidden = np.asarray(run(params, model_config=config, batch=batch, reach=reach))
        lessons.append(Lesson(batch, hidden, temperature, reach))
        if on_batch is not None:
            on_batch(done, len(packed))
    return lessons


def _rows(batch: PackedBatch, chosen: np.ndarray, rows: int) -> PackedBatch:
    """Some rows of a batch, filled up with empty ones."""

    def take(x):
        out = np.zeros((rows, *x.shape[1:]), x.dtype)
        out[: len(chosen)] = x[chosen]
        return out

    return jax.tree.map(take, batch)


def init_state(trained: Any, optimizer: optax.GradientTransformation) -> WarmupState:
    """A fresh state; the first step takes the buffers of `trained` over."""
    return WarmupState(trained, optimizer.init(trained), jnp.int32(0), jnp.int32(0))


def make_step(
    config: ModelConfig, loss: DrafterLossConfig, optimizer: optax.GradientTransformation, *, valid_vocab: int | None = None
):
    """`step(state, fixed, params, lesson) -> (state, metrics)`, compiled once a shape and temperature; `state` is donated.

    `fixed` is the untrained part of the drafter's parameters, `params` the policy's. Metrics are float32 scalars, means over the
    targets of each depth: `loss`, `feature_loss`, `token_loss`, `agreement`, `agreement_2`, …, `grad_norm`.
    """
    value = _loss_of(config, loss, valid_vocab)

    @functools.partial(jax.jit, static_argnames=("temperature", "reach"), donate_argnums=0)
    def run(state: WarmupState, fixed, params, batch, hidden, log_probs, *, temperature, reach):
        def objective(trained):
            out = value(trained, fixed, params, batch, hidden, log_probs, temperature, reach)
            return out.numerator, out

        grads, out = jax.grad(objective, has_aux=True)(state.trained)
        grads = jax.tree.map(lambda g: g / jnp.maximum(out.denominator, 1.0), grads)
        norm = optax.tree.norm(grads)
        applied = (out.denominator > 0) & jnp.isfinite(out.numerator) & jnp.isfinite(norm)
        update = optax.with_extra_args_support(optimizer).update
        updates, opt_state = update(grads, state.opt_state, state.trained, applied=applied)
        trained = jax.tree.map(lambda p, u: jnp.where(applied, p + u.astype(p.dtype), p), state.trained, updates)
        new = WarmupState(
            trained,
            keep_state(applied, opt_state, state.opt_state),
            state.step + 1,
            state.skipped + 1 - applied.astype(jnp.int32),
        )
        return new, _means(out) | {"grad_norm": norm}

    def step(state: WarmupState, fixed: Any, params: Any, lesson: Lesson):
        return run(state, fixed, params, *arrays_of(lesson), temperature=lesson.temperature, reach=lesson.reach)

    return step


def make_measure(config: ModelConfig, loss: DrafterLossConfig, *, valid_vocab: int | None = None):
    """`measure(drafter_params, params, lessons) -> metrics`: those of `make_step` over all targets of some lessons, no step."""
    value = _loss_of(config, loss, valid_vocab)

    @functools.partial(jax.jit, static_argnames=("temperature", "reach"))
    def run(trained, fixed, params, batch, hidden, log_probs, *, temperature, reach):
        return value(trained, fixed, params, batch, hidden, log_probs, temperature, reach)

    def measure(drafter_params: Any, params: Any, lessons: Sequence[Lesson]) -> dict[str, float]:
        trained, fixed = eagle.split(drafter_params)
        parts = [run(trained, fixed, params, *arrays_of(x), temperature=x.temperature, reach=x.reach) for x in lessons]
        return {name: float(x) for name, x in _means(jax.tree.map(lambda *x: sum(x), *parts)).items()}

    return measure


def arrays_of(lesson: Lesson) -> tuple[PackedBatch, np.ndarray, np.ndarray]:
    """What of a lesson goes to the device: the batch, the hidden states, and the log-probs under their own law."""
    own = lesson.batch.log_probs if lesson.log_probs is None else lesson.log_probs
    return lesson.batch, lesson.hidden, own


def _loss_of(config: ModelConfig, loss: DrafterLossConfig, valid_vocab: int | None) -> Callable[..., Loss]:
    def value(trained, fixed, params, batch, hidden, log_probs, temperature, reach) -> Loss:
        out = Forward(hidden, log_probs, jnp.zeros_like(log_probs))
        forward = ForwardConfig(temperature, valid_vocab)
        return packed_drafter_loss(loss, {**trained, **fixed}, params, config, forward, out, batch, reach)

    return value


def _means(out: Loss) -> dict[str, jax.Array]:
    n = jnp.maximum(out.denominator, 1.0)
    means = {"loss": out.numerator / n}
    for name, value in out.sums.items():
        if not name.startswith("targets_"):
            means[name] = value / jnp.maximum(out.sums.get("targets_" + name.rpartition("_")[2], n), 1.0)
    return means


def order(seed: int, lessons: int, steps: int) -> Iterator[int]:
    """Which lesson each step takes: every epoch all of them, in an order of its own."""
    for step in range(steps):
        epoch, place = divmod(step, lessons)
        yield int(np.random.default_rng([seed, epoch]).permutation(lessons)[place])


def expected_accept_length(metrics: dict[str, float], depth: int) -> float:
    """Tokens a verify pass commits if each draft stands with its depth's `agreement`, independently: 1 + a1 + a1 a2 + …

    Depths that were not measured count as the last one that was. Coupled verification accepts a little less.
    """
    length, product, overlap = 1.0, 1.0, metrics["agreement"]
    for d in range(1, depth + 1):
        overlap = metrics.get(f"agreement_{d}", overlap)
        product *= overlap
        length += product
    return length
