"""When two runs of the same requests count as identical.

Ids must be equal, except for a first divergence at a float tie: XLA's products are not bit-equal for different numbers of rows,
so two tokens whose scores agree to the last digits may swap. Every divergence is rescored in float64 and either confirmed as
a tie or reported as a real difference.

Shapes: `V` vocabulary size.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.models import transformer
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import masked_attention
from adrl_jax.sampling import noise
from adrl_jax.types import Rollout, SamplingParams

SCORE_TOLERANCE = 1e-3
"""Two perturbed scores (log p + Gumbel noise; plain logits at temperature 0) closer than this are a tie."""

CUT_TOLERANCE = 1e-5
"""A token whose score or cumulative mass lies this close to a filter's cut may be in or out."""


class Divergence(NamedTuple):
    """Where two rollouts of one request part.

    Attributes:
        index: of the request.
        position: absolute position of the first token that differs; -1 where ids agree and only the ends differ.
        token_ids: the two tokens, -1 past a response's end.
        gap: how far the worse of the two tokens' perturbed scores lies below the best, in float64.
        tie: whether float64 confirms a tie.
    """

    index: int
    position: int
    token_ids: tuple[int, int]
    gap: float
    tie: bool


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The outcome of a comparison."""

    divergences: tuple[Divergence, ...]

    @property
    def identical(self) -> bool:
        """Whether nothing but confirmed ties differs."""
        return all(d.tie for d in self.divergences)

    @property
    def tie_divergences(self) -> int:
        return sum(d.tie for d in self.divergences)


def compare(
    config: ModelConfig,
    params: Any,
    a: Sequence[Rollout],
    b: Sequence[Rollout],
    *,
    seed: int,
    valid_vocab: int | None = None,
) -> Agreement:
    """Compares two runs of the same requests under `coupled` verification.

    Args:
        params: the weights both runs served, in engine layout or not.
        seed, valid_vocab: the engine's.

    Raises:
        ValueError: the two lists are not of the same requests and laws.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} rollouts are not of the same requests")
    found = []
    for index, (x, y) in enumerate(zip(a, b)):
        for field in ("prompt_id", "visit", "sample", "prompt_length", "sampling"):
            if getattr(x, field) != getattr(y, field):
                raise ValueError(f"rollouts {index} differ in {field}: {getattr(x, field)!r} and {getattr(y, field)!r}")
        shared = min(len(x.token_ids), len(y.token_ids))
        different = np.flatnonzero(x.token_ids[:shared] != y.token_ids[:shared])
        if len(different):
            position = int(different[0])
            tokens = int(x.token_ids[position]), int(y.token_ids[position])
            scores = position_logits(config, params, x.token_ids[:position])
            key = noise.request_keys(seed, x.prompt_id, x.visit if x.noise_visit is None else x.noise_visit, x.sample)
            gap = score_gap(
                scores,
                tokens,
                noise.position_keys(key, np.array([[position]]), noise.Role.TARGET)[0, 0],
                x.sampling,
                valid_vocab,
            )
            found.append(Divergence(index, position, tokens, gap, gap < SCORE_TOLERANCE))
        elif len(x.token_ids) != len(y.token_ids):
            ends = [int(r.token_ids[shared]) if len(r.token_ids) > shared else -1 for r in (x, y)]
            found.append(Divergence(index, shared, tuple(ends), float("inf"), False))
        elif x.finish_reason != y.finish_reason:
            found.append(Divergence(index, -1, (-1, -1), float("inf"), False))
    return Agreement(tuple(found))


def position_logits(config: ModelConfig, params: Any, token_ids: np.ndarray) -> np.ndarray:
    """The target's logits for the token after `token_ids`, computed in float64: `[V]`."""
    wide = dataclasses.replace(config, dtype="float64")
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), params)
        tokens = jnp.asarray(token_ids, jnp.int32)[None]
        positions = jnp.arange(len(token_ids), dtype=jnp.int32)[None]

        def attend(q, k, v, *, layer, window, cache):
            seen = positions[..., None] - positions[:, None]
            seen = (seen >= 0) if window is None else (seen >= 0) & (seen < window)
            return masked_attention(q, k.transpose(0, 2, 3, 1), v.swapaxes(1, 2), seen), cache

        hidden, _ = transformer.Transformer(wide).apply({"params": params}, tokens, positions, attend=attend)
        out = np.asarray(transformer.logits(params, hidden[0, -1]))
    if out.dtype != np.float64:
        raise RuntimeError(f"rescoring ran in {out.dtype}, not in float64")
    return out


def score_gap(
    logits: np.ndarray, token_ids: tuple[int, int], key: np.ndarray, sampling: SamplingParams, valid_vocab: int | None
) -> float:
    """How far the worse of two tokens lies below the best perturbed score, where both might pass the filters; else infinity.

    Args:
        logits: float64 `[V]`.
        key: uint32 `[2]`, the position's.
    """
    logits = logits.astype(np.float64)
    if valid_vocab is not None:
        logits[valid_vocab:] = -np.inf
    z = logits / (sampling.temperature or 1.0)
    z = z - z.max()
    possible, certain = z > -np.inf, z > -np.inf
    if sampling.top_k and sampling.top_k < len(z):
        cut = np.sort(z)[-sampling.top_k]
        possible, certain = possible & (z >= cut - CUT_TOLERANCE), certain & (z > cut + CUT_TOLERANCE)
    if sampling.top_p < 1:
        p = np.where(certain | possible, np.exp(z), 0.0)
        p = p / p.sum()
        order = np.argsort(-p, kind="stable")
        before = np.empty_like(p)
        before[order] = np.cumsum(p[order]) - p[order]
        possible = possible & (before < sampling.top_p + CUT_TOLERANCE)
        certain = certain & (before < sampling.top_p - CUT_TOLERANCE)
    if sampling.min_p > 0:
        cut = np.log(sampling.min_p)
        possible, certain = possible & (z >= cut - CUT_TOLERANCE), certain & (z >= cut + CUT_TOLERANCE)
    if sampling.temperature > 0:
        u = (noise.bits(np.asarray(key), len(z)).astype(np.float64) + 0.5) * 2.0**-32
        z = z - np.log(-np.log1p(-u))
    pair = list(token_ids)
    if not possible[pair].all():
        return float("inf")
    best = max(z[certain].max(initial=-np.inf), z[pair].max())
    return float(best - z[pair].min())
