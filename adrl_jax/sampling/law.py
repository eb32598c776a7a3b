"""The law tokens are drawn from, and drawing from it with named noise.

`log_law` is the definition: softmax(logits / temperature), then top-k, top-p, min-p in that order, renormalised. `choose`
draws from it by the Gumbel-max rule, argmax(log p + g), and is what every decode step runs.

Shapes: `...` any leading dimensions, `B` rows, `N` positions, `V` vocabulary size.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.sampling import noise
from adrl_jax.types import SamplingParams

_LANES = 128
"""Reductions over the vocabulary run over `[V / 128, 128]`, first axis first: 128 independent sums or maxima are vector
instructions on CPU, while one long float reduction is a chain of scalars."""

_FLOAT_IDS = 2.0**24
"""Vocabulary ids are exact in float32 below this."""


@dataclasses.dataclass(frozen=True)
class Law:
    """The static part of a law; the temperature travels with each row.

    Attributes:
        top_k: keep the k most likely ids, 0 keeps all.
        top_p: keep the smallest set of most likely ids whose mass reaches this, 1 keeps all.
        min_p: drop ids less likely than `min_p` times the most likely one, 0 keeps all.
        valid_vocab: ids at or past it are never drawn (embedding tables may exceed the tokenizer); None keeps all.

    Equal logits at a cut are kept from the lowest id on.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    valid_vocab: int | None = None

    def __post_init__(self):
        SamplingParams(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
        if self.valid_vocab is not None and self.valid_vocab < 1:
            raise ValueError(f"Law.valid_vocab={self.valid_vocab!r} must be >= 1, or None to keep every id")

    @classmethod
    def of(cls, sampling: SamplingParams, valid_vocab: int | None = None) -> "Law":
        """The law of a request's sampling parameters (without the temperature)."""
        return cls(sampling.top_k, sampling.top_p, sampling.min_p, valid_vocab)

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p cuts anything."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0


def log_law(logits: jax.Array, temperature: jax.Array, law: Law) -> jax.Array:
    """Normalised log-probabilities.

    Args:
        logits: `[..., V]`.
        temperature: `[...]`; 0 gives the limit law, all mass on the most likely id (the lowest one where several are equal).
        law: static.

    Returns:
        float32 `[..., V]`, -inf where the law is cut.
    """
    temperature = jnp.asarray(temperature, jnp.float32)
    shifted = _cut(logits, temperature, law)
    log_p = shifted - jnp.log(_over_vocab(jnp.sum, jnp.exp(shifted), 0.0))[..., None]
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    limit = jnp.where(ids == _most_likely(shifted)[..., None], 0.0, -jnp.inf)
    return jnp.where(temperature[..., None] > 0, log_p, limit)


def choose(logits: jax.Array, temperature: jax.Array, keys: jax.Array, law: Law) -> tuple[jax.Array, jax.Array]:
    """Draws one token per position: argmax(log p + g), ties to float precision aside, and its log p.

    Computed as a race: with E = exp(-g), an Exponential(1) variate, argmax(log p + g) = argmax(p / E). That needs one
    exponential, which the normaliser needs anyway, and one logarithm an id instead of two, and rounds less.

    Args:
        logits: `[B, N, V]`.
        temperature: float32 `[B]`; rows at 0 take the most likely id, with log-probability 0.
        keys: uint32 `[B, N, 2]`, see `noise.position_keys`.
        law: static.

    Returns:
        tokens int32 `[B, N]` and log-probabilities float32 `[B, N]`.
    """
    temperature = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32)[:, None], logits.shape[:-1])
    shifted = _cut(logits, temperature, law)
    total = _over_vocab(jnp.sum, jnp.exp(shifted), 0.0)
    tokens = race(shifted, keys, greedy=temperature == 0)
    log_p = jnp.take_along_axis(shifted, tokens[..., None], axis=-1)[..., 0] - jnp.log(total)
    return tokens, jnp.where(temperature > 0, log_p, 0.0)


def race(log_weights: jax.Array, keys: jax.Array, greedy: jax.Array | None = None) -> jax.Array:
    """argmax over ids of exp(log_weights) / E, with E the Exponential(1) noise of `keys`.

    Args:
        log_weights: float32 `[..., V]`, unnormalised, with maximum 0 (near 0 will do where `greedy` is not given); -inf never
            wins.
        keys: uint32 `[..., 2]`.
        greedy: bool `[...]`, where to take the lowest id of weight 0 without noise instead; None means nowhere.

    Returns:
        int32 `[...]`.
    """
    vocab = log_weights.shape[-1]
    keys = keys[..., None, None, :]

    def scores(log_weights, ids):
        random_bits = noise.hash_ids(keys[..., 0], keys[..., 1], ids.astype(jnp.uint32))
        out = jnp.exp(log_weights) / noise.exponential_of_bits(random_bits)
        if greedy is None:
            return out
        # In the same pass: a reduction of its own, over integers, would take as long as everything else together.
        rank = jnp.where(log_weights == 0, _FLOAT_IDS - ids.astype(jnp.float32), 0.0)
        return jnp.where(greedy[..., None, None], rank, out)

    # Which column holds the winner, then which row of that column: a float argmax over all ids at once would be scalar code.
    table = _as_table(log_weights, -jnp.inf)
    rows, lanes = table.shape[-2:]
    ids = np.arange(rows * lanes, dtype=np.int32).reshape(rows, lanes)
    column = jnp.argmax(jnp.max(scores(table, ids), axis=-2), axis=-1).astype(jnp.int32)[..., None]
    ids = column + np.arange(rows, dtype=np.int32) * lanes
    weights = jnp.take_along_axis(table, column[..., None], axis=-1)
    row = jnp.argmax(scores(weights, ids[..., None])[..., 0], axis=-1)
    tokens = jnp.take_along_axis(ids, row[..., None], axis=-1)[..., 0]
    return jnp.minimum(tokens, vocab - 1)


def _cut(logits: jax.Array, temperature: jax.Array, law: Law) -> jax.Array:
    """(logits - max) / temperature, float32 with maximum 0, and -inf where the law is cut. Temperature 0 counts as 1."""
    vocab = logits.shape[-1]
    logits = logits.astype(jnp.float32)
    if law.valid_vocab is not None and law.valid_vocab < vocab:
        logits = jnp.where(jnp.arange(vocab) < law.valid_vocab, logits, -jnp.inf)
    top = _over_vocab(jnp.max, logits, -jnp.inf)
    shifted = (logits - top[..., None]) / jnp.where(temperature > 0, temperature, 1.0)[..., None]
    if law.top_k:
        kept = _smallest_set(shifted, jnp.ones_like(shifted, jnp.int32), jnp.full(top.shape, law.top_k, jnp.int32))
        shifted = jnp.where(kept, shifted, -jnp.inf)
    if law.top_p < 1:
        mass = jnp.exp(shifted)
        kept = _smallest_set(shifted, mass, law.top_p * _over_vocab(jnp.sum, mass, 0.0))
        shifted = jnp.where(kept, shifted, -jnp.inf)
    if law.min_p > 0:
        shifted = jnp.where(shifted >= np.log(law.min_p), shifted, -jnp.inf)
    return shifted


def _smallest_set(shifted: jax.Array, measure: jax.Array, needed: jax.Array) -> jax.Array:
    """The most likely ids, lowest first among equals, whose `measure` adds up to `needed`: bool `[..., V]`.

    Two bisections, over the bit patterns of the values and then over the ids of those equal to the last one, instead of a
    sort: each step is one vectorised pass.
    """
    vocab = shifted.shape[-1]
    # Values are <= 0, so the bits of their magnitude, read as an integer, grow as they become less likely.
    cost = jax.lax.bitcast_convert_type(jnp.abs(shifted), jnp.int32)
    ids = jnp.arange(vocab, dtype=jnp.int32)

    def reaches(selected):
        return _over_vocab(jnp.sum, jnp.where(selected, measure, 0), 0) >= needed

    def smallest(selected, highest: int):
        def halve(_, bounds):
            low, high = bounds
            middle = low + (high - low) // 2
            enough = reaches(selected(middle[..., None]))
            return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

        low = jnp.zeros(needed.shape, jnp.int32)
        high = jnp.full(needed.shape, highest, jnp.int32)
        return jax.lax.fori_loop(0, highest.bit_length(), halve, (low, high))[1][..., None]

    last = smallest(lambda cut: cost <= cut, 0x7F800000)
    cut = smallest(lambda cut: (cost < last) | ((cost == last) & (ids <= cut)), vocab - 1)
    return (cost < last) | ((cost == last) & (ids <= cut))


def _most_likely(shifted: jax.Array) -> jax.Array:
    """The lowest id whose value is the maximum, 0: int32 `[...]`."""
    vocab = shifted.shape[-1]
    rank = jnp.where(shifted == 0, _FLOAT_IDS - jnp.arange(vocab, dtype=jnp.float32), 0.0)
    return jnp.minimum(_FLOAT_IDS - _over_vocab(jnp.max, rank, 0.0), vocab - 1).astype(jnp.int32)


def _as_table(x: jax.Array, fill) -> jax.Array:
    vocab = x.shape[-1]
    lanes = _LANES if vocab >= 8 * _LANES else 1
    padding = -vocab % lanes
    if padding:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)], constant_values=fill)
    return x.reshape(*x.shape[:-1], -1, lanes)


def _over_vocab(reduce: Callable, x: jax.Array, neutral) -> jax.Array:
    return reduce(reduce(_as_table(x, neutral), axis=-2), axis=-1)
