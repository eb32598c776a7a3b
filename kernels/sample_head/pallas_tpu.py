"""`sample_head` on TPU: the weight streams through once in tiles of ids, and only sums and winners are kept.

The grid is (tiles of positions, tiles of ids), ids fastest. Per tile of ids: logits by one product, random bits by the same
integer hash as everywhere, then a running log-sum-exp and a running list of the best perturbed scores. A list is touched only
when some position's tile has a score above its worst entry, which happens about log V times.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from adrl_kernels.noise import gumbel_in_kernel, hash_ids
from adrl_kernels.plan import Operand, Plan, cdiv, round_up
from adrl_kernels.sample_head.arguments import Draws, Norm
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MAX_DRAWS = 16
MAX_HIDDEN = 16384
_LANES = 128
_ROWS = 256  # positions handled together; more of them read the weight again
_TILE_BYTES = 2 << 20
_MASKED = -1e30
_NONE = 2**30


def problem(hidden, weight, draws: int) -> str | None:
    """What keeps the kernel from doing this call, None where nothing does."""
    if hidden.dtype not in (jnp.float32, jnp.bfloat16):
        return f"hidden is {hidden.dtype}; float32 and bfloat16 are supported"
    if draws > MAX_DRAWS:
        return f"{draws} draws; 1 to {MAX_DRAWS} are supported"
    if hidden.shape[1] > MAX_HIDDEN:
        return f"hidden size {hidden.shape[1]}; up to {MAX_HIDDEN} is supported"
    return None


def tile_ids(size: int, vocab: int, dtype) -> int:
    """Ids of a tile: about two megabytes of weights, a multiple of 128."""
    fitting = _TILE_BYTES // (size * jnp.dtype(dtype).itemsize) // _LANES * _LANES
    return min(int(np.clip(fitting, _LANES, 1024)), round_up(vocab, _LANES))


def plan(hidden, weight, *, by_row: bool, valid_vocab: int, norm: bool = False) -> Plan:
    """Grid and blocks for these shapes; no scalar arrays."""
    count, size = hidden.shape
    vocab = weight.shape[0 if by_row else 1]
    rows = min(_ROWS, round_up(count, 16))
    padded = round_up(count, rows)
    # A block as large as a dimension is always legal; a larger one is not.
    ids = min(tile_ids(size, valid_vocab, weight.dtype), vocab)
    tile = (ids, size) if by_row else (size, ids)
    inputs = [
        Operand("hidden", (padded, size), hidden.dtype, (rows, size), lambda m, v: (m, 0)),
        Operand("weight", weight.shape, weight.dtype, tile, (lambda m, v: (v, 0)) if by_row else (lambda m, v: (0, v))),
        Operand("keys", (padded, 2), jnp.int32, (rows, 2), lambda m, v: (m, 0)),
        Operand("temperature", (padded, 2), jnp.float32, (rows, 2), lambda m, v: (m, 0)),
    ]
    if norm:
        inputs.append(Operand("norm", (1, size), jnp.float32, (1, size), lambda m, v: (0, 0)))
    table = lambda dtype: pltpu.VMEM((rows, _LANES), dtype)  # noqa: E731
    return Plan(
        grid=(padded // rows, cdiv(valid_vocab, ids)),
        semantics=("parallel", "arbitrary"),
        inputs=tuple(inputs),
        outputs=(Operand("out", (padded, _LANES), jnp.float32, (rows, _LANES), lambda m, v: (m, 0)),),
        scratch=(
            table(jnp.float32),
            table(jnp.float32),
            table(jnp.int32),
            table(jnp.float32),
            table(jnp.float32),
            *([pltpu.VMEM((rows, size), hidden.dtype)] if norm else []),
        ),
        vmem_limit=48 << 20,
    )


def _kernel(hidden, weight, keys, temperature, *refs, by_row, valid, draws, eps, precision, widen):
    norm = refs[0] if eps is not None else None
    out, best, logit_of, id_of, top, total = refs[(eps is not None) :][:6]
    v, last = pl.program_id(1), pl.num_programs(1) - 1

    @pl.when(v == 0)
    def _start():
        best[...] = jnp.full_like(best, 2 * _MASKED)
        logit_of[...] = jnp.zeros_like(logit_of)
        id_of[...] = jnp.full_like(id_of, _NONE)
        top[...] = jnp.full_like(top, _MASKED)
        total[...] = jnp.zeros_like(total)
        if eps is not None:
            wide = hidden[...].astype(jnp.float32)
            factor = jax.lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + eps)
            refs[-1][...] = (wide * factor * norm[...]).astype(hidden.dtype)

    x, w = (hidden if eps is None else refs[-1])[...], weight[...]
    if widen:  # CPUs have no bfloat16 products with float32 sums; the products are the same
        x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    contract = (((1,), (1 if by_row else 0,)), ((), ()))
    logits = jax.lax.dot_general(x, w, contract, precision=precision, preferred_element_type=jnp.float32)
    rows, width = logits.shape
    ids = v * width + jax.lax.broadcasted_iota(jnp.int32, (rows, width), 1)
    scaled = jnp.where(ids < valid, logits * temperature[:, 0:1], _MASKED)

    before = top[:, 0:1]
    highest = jnp.maximum(before, jnp.max(scaled, axis=1, keepdims=True))
    sums = total[:, 0:1] * jnp.exp(before - highest) + jnp.sum(jnp.exp(scaled - highest), axis=1, keepdims=True)
    top[...] = jnp.broadcast_to(highest, top.shape)
    total[...] = jnp.broadcast_to(sums, total.shape)

    as_bits = lambda a: jax.lax.bitcast_convert_type(a, jnp.uint32)  # noqa: E731
    random_bits = hash_ids(as_bits(keys[:, 0:1]), as_bits(keys[:, 1:2]), as_bits(ids))
    scores = scaled + temperature[:, 1:2] * gumbel_in_kernel(random_bits)

    lanes = jax.lax.broadcasted_iota(jnp.int32, (rows, _LANES), 1)
    worst = jnp.sum(jnp.where(lanes == draws - 1, best[...], 0.0), axis=1, keepdims=True)

    @pl.when(jnp.max(jnp.max(scores, axis=1, keepdims=True) - worst) > 0)
    def _merge():
        fresh, kept = scores, best[...]
        kept_ids, kept_logits = id_of[...], logit_of[...]
        new_best, new_ids, new_logits = jnp.full_like(kept, 2 * _MASKED), jnp.full_like(kept_ids, _NONE), jnp.zeros_like(kept)
        for i in range(draws):
            score = jnp.maximum(jnp.max(fresh, axis=1, keepdims=True), jnp.max(kept, axis=1, keepdims=True))
            of_kept = jnp.min(jnp.where(kept == score, kept_ids, _NONE), axis=1, keepdims=True)
            of_fresh = jnp.min(jnp.where(fresh == score, ids, _NONE), axis=1, keepdims=True)
            chosen = jnp.minimum(of_kept, of_fresh)  # the lowest id among equals
            logit = jnp.sum(jnp.where(ids == chosen, scaled, 0.0), axis=1, keepdims=True)
            logit += jnp.sum(jnp.where(kept_ids == chosen, kept_logits, 0.0), axis=1, keepdims=True)
            fresh, kept = jnp.where(ids == chosen, 4 * _MASKED, fresh), jnp.where(kept_ids == chosen, 4 * _MASKED, kept)
            here = lanes == i
            new_best = jnp.where(here, score, new_best)
            new_ids = jnp.where(here, chosen, new_ids)
            new_logits = jnp.where(here, logit, new_logits)
        best[...], id_of[...], logit_of[...] = new_best, new_ids, new_logits

    @pl.when(v == last)
    def _finish():
        # One row of 128 numbers a position: scores, logits and ids (exact below 2**24), 32 lanes each, and the log of the sum.
        packed = jnp.broadcast_to(top[:, 0:1] + jnp.log(total[:, 0:1]), (rows, _LANES))
        column = lambda a, i: jnp.sum(jnp.where(lanes == i, a, 0), axis=1, keepdims=True)  # noqa: E731
        for i in range(draws):
            packed = jnp.where(lanes == i, column(best[...], i), packed)
            packed = jnp.where(lanes == 32 + i, column(logit_of[...], i), packed)
            packed = jnp.where(lanes == 64 + i, column(id_of[...], i).astype(jnp.float32), packed)
        out[...] = packed


def sample_head(
    hidden: jax.Array,
    weight: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    *,
    by_row: bool,
    valid_vocab: int,
    draws: int,
    norm: Norm | None,
    interpret: Any = False,
) -> Draws:
    """Arguments and result as in `api.sample_head`; `interpret` as in `verify_attention.pallas_tpu`."""
    count = hidden.shape[0]
    if by_row and hidden.shape[1] % _LANES:
        # A TPU stores such a matrix the other way round, so that no row is filled up; read as `[V, H]` it would be copied.
        weight, by_row = weight.T, False
    layout = plan(hidden, weight, by_row=by_row, valid_vocab=valid_vocab, norm=norm is not None)
    padded = layout.inputs[0].shape[0]
    greedy = temperature == 0
    scale = jnp.where(greedy, 1.0, 1.0 / jnp.where(greedy, 1.0, temperature))
    both = jnp.stack([scale, jnp.where(greedy, 0.0, 1.0)], axis=1).astype(jnp.float32)
    pad = lambda x: jnp.pad(x, ((0, padded - count), (0, 0)))  # noqa: E731
    arrays = [pad(hidden), weight, pad(jax.lax.bitcast_convert_type(keys, jnp.int32)), pad(both)]
    if norm is not None:
        arrays.append(norm.weight.astype(jnp.float32)[None])
    kernel = functools.partial(
        _kernel,
        by_row=by_row,
        valid=valid_vocab,
        draws=draws,
        eps=None if norm is None else norm.eps,
        precision=jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None,
        widen=interpret is not False,
    )
    (packed,) = layout.call(kernel, (), arrays, name="sample_head", interpret=interpret)
    packed = packed[:count]
    total = packed[:, 96]
    log_probs = packed[:, 32 : 32 + draws] - total[:, None]
    limit = jnp.where(jnp.arange(draws) == 0, 0.0, -jnp.inf)
    return Draws(
        packed[:, 64 : 64 + draws].astype(jnp.int32),
        packed[:, :draws],
        jnp.where(greedy[:, None], limit, log_probs),
        total,
    )
