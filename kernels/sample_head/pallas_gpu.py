"""`sample_head` on NVIDIA Hopper through Mosaic GPU. Lowered and interpreted on CPUs so far; no GPU has run it.

A block of threads handles 64 positions and one tile of ids: logits by tensor-core products whose operands arrive by asynchronous
copies, then noise, maximum and sums in registers. What leaves the chip are five numbers a position and tile, which XLA
joins: 1/26 of the logits' bytes, and a thousandth of the weights'. Blocks of one tile of ids and several of positions run next to each
other, so that the weights they share come from the cache.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from adrl_kernels.mosaic_gpu import ROWS, SWIZZLED, across, column, gumbel, iota
from adrl_kernels.noise import hash_ids
from adrl_kernels.plan import cdiv, round_up
from adrl_kernels.sample_head.arguments import Draws, Norm
from adrl_kernels.sample_head.reference import normalized
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_IDS = 128
_DEPTH = 64  # channels of one copy
_SLOTS = 4
_MASKED = -1e30
_NONE = 2.0**30


def problem(hidden, weight, draws: int) -> str | None:
    """What keeps the kernel from doing this call, None where nothing does."""
    if hidden.dtype != jnp.bfloat16:
        return f"hidden is {hidden.dtype}; bfloat16 is supported"
    if draws != 1:
        return f"{draws} draws; 1 is supported"
    if hidden.shape[1] % _DEPTH:
        return f"hidden size {hidden.shape[1]}; multiples of {_DEPTH} are supported"
    if weight.shape[0] % 8 or weight.shape[1] % _DEPTH:  # pieces in which copies lay operands out
        return f"a weight of {weight.shape[0]} x {weight.shape[1]}; multiples of 8 x {_DEPTH} are supported"
    return None


def _kernel(hidden, weight, keys, temperature, out, *scratch, size, by_row, valid, interpreted):
    h_smem, w_smem, key_smem, temperature_smem, out_smem, h_barriers, w_barriers, row_barriers = scratch
    tile = jax.lax.axis_index("ids")
    rows = pl.ds(jax.lax.axis_index("positions") * ROWS, ROWS)
    steps = size // _DEPTH

    def fetch(step, slot):
        depth = pl.ds(step * _DEPTH, _DEPTH)
        plgpu.copy_gmem_to_smem(hidden.at[rows, depth], h_smem.at[slot], h_barriers.at[slot])
        ids = pl.ds(tile * _IDS, _IDS)
        part = weight.at[ids, depth] if by_row else weight.at[depth, ids]
        plgpu.copy_gmem_to_smem(part, w_smem.at[slot], w_barriers.at[slot])

    for i in range(2):
        plgpu.copy_gmem_to_smem(keys.at[i, rows], key_smem.at[i], row_barriers.at[i])
        plgpu.copy_gmem_to_smem(temperature.at[i, rows], temperature_smem.at[i], row_barriers.at[2 + i])
    for slot in range(min(_SLOTS, steps)):
        fetch(slot, slot)

    def multiply(acc):
        def step(i, _):
            slot = jax.lax.rem(i, _SLOTS)
            plgpu.barrier_wait(h_barriers.at[slot])
            plgpu.barrier_wait(w_barriers.at[slot])
            w = w_smem.at[slot]
            plgpu.wgmma(acc, h_smem.at[slot], plgpu.transpose_ref(w, (1, 0)) if by_row else w)
            plgpu.wgmma_wait(0)
            pl.when(i + _SLOTS < steps)(functools.partial(fetch, i + _SLOTS, slot))

        jax.lax.fori_loop(0, steps, step, None)
        return acc[...]

    logits = pl.run_scoped(multiply, plgpu.ACC((ROWS, _IDS), jnp.float32))
    for i in range(4):
        plgpu.barrier_wait(row_barriers.at[i])
    shape = (ROWS, _IDS)
    ids = iota(shape, 1, interpreted) + tile * _IDS
    scale, noisy = (across(column(temperature_smem.at[i], interpreted), shape) for i in range(2))
    scaled = jnp.where(ids < valid, logits * scale, _MASKED)
    top = scaled.max(axis=1)
    total = jnp.exp(scaled - across(top, shape)).sum(axis=1)
    key0, key1 = (across(column(key_smem.at[i], interpreted), shape) for i in range(2))
    scores = scaled + noisy * gumbel(hash_ids(key0, key1, ids.astype(jnp.uint32)))
    best = scores.max(axis=1)
    number = ids.astype(jnp.float32)  # exact below 2**24
    chosen = -jnp.where(scores == across(best, shape), -number, -_NONE).max(axis=1)  # the lowest among equals
    logit = jnp.where(number == across(chosen, shape), scaled, 0.0).sum(axis=1)
    for i, value in enumerate((best, chosen, logit, top, total)):
        out_smem.at[i][...] = value
    plgpu.commit_smem()
    for i in range(5):
        plgpu.copy_smem_to_gmem(out_smem.at[i], out.at[i, tile, rows])
    plgpu.wait_smem_to_gmem(0)


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
    """Arguments and result as in `api.sample_head`; `interpret` as in `verify_attention.pallas_gpu`."""
    count, size = hidden.shape
    padded, tiles = round_up(count, ROWS), cdiv(valid_vocab, _IDS)
    greedy = temperature == 0
    scale = jnp.where(greedy, 1.0, 1.0 / jnp.where(greedy, 1.0, temperature))
    both = jnp.stack([scale, jnp.where(greedy, 0.0, 1.0)]).astype(jnp.float32)
    pad = lambda x: jnp.pad(x, ((0, 0), (0, padded - count)))  # noqa: E731
    hidden = jnp.pad(normalized(hidden, norm), ((0, padded - count), (0, 0)))
    run = plgpu.kernel(
        functools.partial(_kernel, size=size, by_row=by_row, valid=valid_vocab, interpreted=interpret is not False),
        out_type=jax.ShapeDtypeStruct((5, tiles, padded), jnp.float32),
        grid=(tiles, padded // ROWS),
        grid_names=("ids", "positions"),
        scratch_types=[
            plgpu.SMEM((_SLOTS, ROWS, _DEPTH), jnp.bfloat16, transforms=SWIZZLED),
            plgpu.SMEM((_SLOTS, _IDS, _DEPTH) if by_row else (_SLOTS, _DEPTH, _IDS), jnp.bfloat16, transforms=SWIZZLED),
            plgpu.SMEM((2, ROWS), jnp.uint32),
            plgpu.SMEM((2, ROWS), jnp.float32),
            plgpu.SMEM((5, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=_SLOTS),
            plgpu.Barrier(num_barriers=_SLOTS),
            plgpu.Barrier(num_barriers=4),
        ],
        **({} if interpret is False else {"interpret": interpret}),
    )
    best, ids, logit, top, total = run(hidden, weight, pad(keys.T), pad(both))[:, :, :count]
    winner = jnp.argmax(best, axis=0)[None]  # the first tile among equals
    best, ids, logit = (jnp.take_along_axis(x, winner, axis=0).T for x in (best, ids, logit))
    highest = jnp.max(top, axis=0)
    log_total = highest + jnp.log(jnp.sum(total * jnp.exp(top - highest), axis=0))
    log_probs = jnp.where(greedy[:, None], 0.0, logit - log_total[:, None])
    return Draws(ids.astype(jnp.int32), best, log_probs, log_total)
