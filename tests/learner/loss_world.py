"""A hand batch, every loss that can be composed, and the same losses once more in float64 numpy, response by response."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np

from adrl_jax.learner import packing, update, weights
from adrl_jax.learner.forward import Forward
from adrl_jax.learner.loss_config import LossConfig
from adrl_jax.types import FinishReason, Rollout, SamplingParams

LENGTHS = ((3, 1), (2, 4), (5, 2))  # three prompts with two responses each
UPDATES = 2  # updates since the proximal policy
ROWS, TARGETS = 6, sum(map(sum, LENGTHS))  # every batch is padded to these, so that operations are compiled once
MEASURED = {"old_log_probs": "recompute"}

CASES = {
    "grpo": dict(clip_low=0.1, clip_high=0.15),
    "entropy": dict(entropy_coef=0.05),
    "sequence mean": dict(aggregation="sequence"),
    "sequence sum": dict(aggregation="sequence_sum"),
    "constant": dict(aggregation="constant", constant_length=7),
    "group mean": dict(aggregation="group"),
    "dual clip": dict(dual_clip=1.2),
    "ratio": dict(surrogate="ratio"),
    "reinforce": dict(surrogate="reinforce"),
    "rloo": dict(surrogate="reinforce", aggregation="sequence_sum"),
    "cispo": dict(surrogate="cispo", clip_low=0.2, clip_high=0.1),
    "gspo": dict(surrogate="gspo", aggregation="sequence", clip_low=0.05, clip_high=0.06),
    "prox_rloo": dict(surrogate="prox_rloo", aggregation="sequence"),
    "topr": dict(surrogate="topr", aggregation="sequence_sum"),
    "online_dpo": dict(surrogate="online_dpo", aggregation="group", beta=0.3),
    "ipo": dict(surrogate="ipo", aggregation="group", beta=0.3),
    "copg": dict(surrogate="copg", aggregation="group", beta=0.3),
    "best_of_n": dict(surrogate="best_of_n", aggregation="sequence_sum"),
    "decoupled": MEASURED,
    "interpolated": dict(old_log_probs="interpolate"),
    "decoupled gspo": dict(surrogate="gspo", aggregation="sequence", clip_low=0.05, clip_high=0.06, **MEASURED),
    "token tis": dict(weight="token", weight_high=1.05, **MEASURED),
    "token tis, lower": dict(weight="token", weight_low=0.9, weight_high=1.1, **MEASURED),
    "sequence tis": dict(weight="sequence", weight_high=1.1, **MEASURED),
    "geometric tis": dict(weight="geometric", weight_low=0.95, weight_high=1.02, **MEASURED),
    "interpolated tis": dict(weight="token", weight_high=1.05, old_log_probs="interpolate"),
    "aipo": dict(surrogate="reinforce", weight="token", weight_high=1.1),
    "unbounded": dict(surrogate="reinforce", weight="sequence", weight_high=0.0),
    "vespo": dict(surrogate="reinforce", weight="vespo"),
    "tis prox_rloo": dict(surrogate="prox_rloo", aggregation="sequence", weight="sequence", weight_high=1.1, **MEASURED),
    "icepop": dict(weight="token", weight_high=0.0, mask="token", mask_low=0.9, mask_high=1.1, **MEASURED),
    "mis": dict(weight="sequence", weight_high=0.0, mask="sequence", mask_low=0.8, mask_high=1.1, **MEASURED),
    "geometric mask": dict(mask="geometric", mask_low=0.9, mask_high=1.05),
    "opsm": dict(mask="opsm"),
    "dppo": dict(surrogate="ratio", mask="probability", mask_threshold=0.02),
    "m2po": dict(mask="m2po", mask_threshold=0.005, **MEASURED),
    "k2": dict(kl_coef=0.2, kl_estimator="k2"),
    "k3": dict(kl_coef=0.2),
    "k1, corrected": dict(kl_coef=0.2, kl_estimator="k1", kl_correction=True),
    "k2, corrected": dict(kl_coef=0.2, kl_estimator="k2", kl_correction=True),
    "k3, corrected": dict(kl_coef=0.2, kl_correction=True),
}
CONFIGS = {name: LossConfig(**fields) for name, fields in CASES.items()}


@dataclasses.dataclass(frozen=True)
class Response:
    """One response's numbers, float64 `[R]`; `advantage`, `group`, `staleness` are one number each."""

    current: np.ndarray
    entropy: np.ndarray
    behaviour: np.ndarray
    proximal: np.ndarray
    reference: np.ndarray
    advantage: float
    group: int
    staleness: int


@functools.lru_cache
def responses(seed=2):
    """Log-probs that differ by a tenth or so between the laws; the first of each group is the better one."""
    rng = np.random.default_rng(seed)
    out = []
    for group, lengths in enumerate(LENGTHS):
        for k, n in enumerate(lengths):
            # What JAX is given is float32; the oracle starts from the same numbers.
            draw = lambda scale, n=n: rng.normal(0, scale, n).astype(np.float32).astype(np.float64)  # noqa: E731
            behaviour = -np.abs(draw(1.0)) - 0.5
            proximal = behaviour + draw(0.1)
            out.append(
                Response(
                    (proximal + draw(0.15)).astype(np.float32).astype(np.float64),
                    np.abs(draw(1.0)),
                    behaviour.astype(np.float32).astype(np.float64),
                    proximal.astype(np.float32).astype(np.float64),
                    (behaviour + draw(0.3)).astype(np.float32).astype(np.float64),
                    float(np.float32((1.0, -1.0)[k] * rng.uniform(0.5, 1.5))),
                    group,
                    int(rng.integers(0, 4)),
                )
            )
    return tuple(out)


def for_config(config, chosen):
    """The responses as this loss gets them: +-1 for pairs, 1 for the best."""
    kind = config.parts.advantages
    value = {"pair": np.sign, "best": lambda a: 1.0}.get(kind, lambda a: a)
    return [dataclasses.replace(r, advantage=float(value(r.advantage))) for r in chosen]


def kept(config, chosen):
    """M2PO's mask of each response; all True for other losses."""
    if config.mask != "m2po":
        return [np.ones(len(r.current), bool) for r in chosen]
    return weights.second_moment_mask([r.proximal - r.behaviour for r in chosen], config.mask_threshold or 0.04)


# JAX's side.


def batch_of(config, chosen, *, layout="plain", row_length=64, padded=False, row_multiple=1):
    """A packed batch of the responses (prompts of one token), and its log-probs and entropies `[M, U]`."""
    rollouts = [
        Rollout(
            r.group,
            0,
            i,
            r.group,
            np.concatenate([[r.group], np.full(len(r.current), 1)]).astype(np.int32),
            1,
            len(r.current),
            r.behaviour.astype(np.float32),
            np.full(len(r.current), -r.staleness, np.int32),
            FinishReason.STOP,
            SamplingParams(),
        )
        for i, r in enumerate(chosen)
    ]
    settings = dict(layout=layout, row_multiple=row_multiple, target_multiple=1, together=config.keeps_groups)
    values = [r.advantage for r in chosen]
    if padded:
        # One response a row, or one group where groups stay together; rows are as long as the longest.
        row_length = packing.longest_unit(rollouts, layout, config.keeps_groups)
        parts = {}
        for i, r in enumerate(rollouts):
            parts.setdefault(r.group_id if config.keeps_groups else i, []).append(i)
        batch = packing.empty_batch(len(parts), row_length, row_length)
        for m, members in enumerate(parts.values()):
            one = packing.pack([rollouts[i] for i in members], [values[i] for i in members], row_length=row_length, **settings)
            for name in batch._fields:
                if getattr(batch, name) is not None:
                    part = getattr(one, name)[0]
                    if name == "rollout_index":
                        part = np.array(members)[part]
                    getattr(batch, name)[m, : len(part)] = part
    else:
        batch = packing.pack(rollouts, values, row_length=row_length, **settings)
    batch = jax.tree.map(_to_size, batch)
    place = functools.partial(packing.scatter_targets, batch)
    batch = batch._replace(
        proximal=place([r.proximal for r in chosen]) if config.needs_proximal else None,
        proximal_lag=np.full(batch.target_mask.shape, UPDATES, np.int32),
        reference=place([r.reference for r in chosen]) if config.needs_reference else None,
        keep=place(kept(config, chosen), bool),
    )
    return batch, place([r.current for r in chosen]), place([r.entropy for r in chosen])


def _to_size(x):
    """`[m, u]` padded to `[ROWS, TARGETS]`; what is indexed by tokens is not read by losses."""
    x = x[:, :TARGETS]
    return np.pad(x, [(0, ROWS - x.shape[0]), (0, TARGETS - x.shape[1])])


class Found(NamedTuple):
    """What a loss says of a batch, undivided."""

    numerator: jax.Array
    denominator: jax.Array
    tokens: jax.Array
    masked: jax.Array


@functools.lru_cache
def compiled(config):
    objective = update.policy_objective(config)

    def numerator(inputs, batch):
        loss = objective(Forward(None, *inputs), batch)
        return loss.numerator, Found(loss.numerator, loss.denominator, loss.sums["tokens"], loss.sums["masked"])

    return jax.jit(jax.grad(numerator, has_aux=True))


def run(config, batch, log_probs, entropy):
    """Loss and its gradients `[M, U]` by log-probs and entropies, undivided."""
    gradients, found = compiled(config)((log_probs, entropy), batch)
    return found, jax.tree.map(np.asarray, gradients)


def by_response(config, chosen, **layout):
    """Loss and its gradients by log-probs and entropies of each response."""
    batch, log_probs, entropy = batch_of(config, chosen, **layout)
    loss, gradients = run(config, batch, log_probs, entropy)
    n = float(loss.denominator)
    parts = [packing.unpack_targets(batch, g / n, len(chosen)) for g in gradients]
    return float(loss.numerator) / n, np.concatenate(parts[0]), np.concatenate(parts[1])


# The oracle. `moving` carries the gradient, `still` is the same numbers where a gradient is stopped.


def clip(x, low, high):
    return min(max(x, low), high)


def surrogate(config, r, moving, still, proximal, group):
    """Token losses, unweighted. `group` lists (response, moving) of the own group."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    d, frozen = moving - proximal, still - proximal
    a = r.advantage

    def clipped(ratio):
        loss = -min(ratio * a, clip(ratio, low, high) * a)
        return min(loss, -config.dual_clip * a) if config.dual_clip and a < 0 else loss

    name = config.surrogate
    if name == "ppo_clip":
        return np.array([clipped(x) for x in np.exp(d)])
    if name == "ratio":
        return -np.exp(d) * a
    if name == "reinforce":
        return -a * moving
    if name == "best_of_n":
        return -moving
    if name == "cispo":
        return np.array([-clip(x, low, high) * a * m for x, m in zip(np.exp(frozen), moving)])
    if name == "gspo":
        return np.full(len(d), clipped(np.exp(d.mean())))
    if name == "prox_rloo":
        return np.full(len(d), clipped(np.exp(d.sum())))
    if name == "topr":
        return -(1.0 if a >= 0 else min(np.exp(frozen.sum()), 1.0)) * a * moving
    margins = [(m - x.reference).sum() for x, m in group]
    if name == "copg":
        rewards = [x.advantage - config.beta * h for (x, _), h in zip(group, margins)]
        pairs = [(i, j) for i in range(len(rewards)) for j in range(i)]
        return np.full(len(d), sum((rewards[i] - rewards[j]) ** 2 for i, j in pairs) / (2 * config.beta * (len(rewards) - 1)))
    margin = sum(x.advantage * h for (x, _), h in zip(group, margins))
    if name == "online_dpo":
        return np.full(len(d), np.log1p(np.exp(-config.beta * margin)))
    assert name == "ipo"
    return np.full(len(d), (margin - 1 / (2 * config.beta)) ** 2)


def correction(config, r, still, proximal):
    """Weight and mask, `[R]` each."""
    n = len(still)
    d = (still if config.old_log_probs == "behaviour" else proximal) - r.behaviour
    levels = {"token": d, "sequence": np.full(n, d.sum()), "geometric": np.full(n, d.mean())}
    weight, keep = np.ones(n), np.ones(n, bool)
    if config.weight == "vespo":
        k, rate = (2, 3) if r.advantage > 0 else (3, 2)
        whole = np.exp(d.sum())
        weight = np.full(n, whole**k * np.exp(rate * (1 - whole)))
    elif config.weight != "none":
        weight = np.array([clip(x, config.weight_low, config.weight_high or np.inf) for x in np.exp(levels[config.weight])])
    if config.mask in levels:
        ratio = np.exp(levels[config.mask])
        keep = (ratio >= config.mask_low) & (ratio <= config.mask_high)
    elif config.mask == "opsm":
        keep = np.full(n, not (r.advantage < 0 and (r.behaviour - still).mean() > (config.mask_threshold or 1e-4)))
    elif config.mask == "probability":
        moved = np.exp(still) - np.exp(r.behaviour)
        limit = config.mask_threshold or 0.2
        keep = np.array([not ((r.advantage > 0 and x > limit) or (r.advantage < 0 and -x > limit)) for x in moved])
    return weight, keep


def kl_term(config, r, moving, still):
    k1 = moving - r.reference
    k = {"k1": k1, "k2": k1**2 / 2, "k3": np.exp(-k1) - 1 + k1}[config.kl_estimator]
    if not config.kl_correction:
        return k
    return k * np.exp((still if config.kl_estimator == "k2" else moving) - r.behaviour)


def oracle(config, chosen, moving, entropy):
    """The loss of the batch; `moving` and `entropy` are lists of `[R]`."""
    keeps = kept(config, chosen)
    numerator = denominator = 0.0
    groups = {g: [(x, m) for x, m in zip(chosen, moving) if x.group == g] for g in {r.group for r in chosen}}
    for i, r in enumerate(chosen):
        still, n = r.current, len(r.current)
        share = r.staleness / max(r.staleness + UPDATES, 1)
        proximal = {
            "behaviour": r.behaviour,
            "recompute": r.proximal,
            "interpolate": r.behaviour + share * (still - r.behaviour),
        }[config.old_log_probs]
        weight, keep = correction(config, r, still, proximal)
        token = surrogate(config, r, moving[i], still, proximal, groups[r.group]) * weight * (keep & keeps[i])
        token = token - config.entropy_coef * entropy[i]
        if config.kl_coef:
            token = token + config.kl_coef * kl_term(config, r, moving[i], still)
        in_group = sum(len(x.current) for x, _ in groups[r.group])
        scale, count = {
            "token": (1.0, n),
            "sequence": (1 / n, 1),
            "sequence_sum": (1.0, 1),
            "constant": (1.0, config.constant_length),
            "group": (1 / in_group, n / in_group),
        }[config.aggregation]
        numerator += scale * token.sum()
        denominator += count
    return numerator / denominator


def differences(f, parts, step=1e-6):
    """Central differences of `f` by every element of a list of vectors."""
    out = []
    for i in range(len(parts)):
        for j in range(len(parts[i])):
            values = []
            for sign in (1, -1):
                moved = [x.copy() for x in parts]
                moved[i][j] += sign * step
                values.append(f(moved))
            out.append((values[0] - values[1]) / (2 * step))
    return np.array(out)
