"""`log_probs` on TPU: the projection streams through in tiles of ids; the backward pass computes each tile's logits again.

Three kernels. Forward: running maximum, sum and weighted sum of each target. Backward by hidden states: a sum over tiles of
ids. Backward by the projection: a sum over tiles of targets, so that each tile of the projection's gradient is written once.
Between the passes two numbers a target are kept.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from adrl_kernels.log_probs.xla import Static
from adrl_kernels.plan import Operand, Plan, cdiv, round_up
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MAX_HIDDEN = 8192
_LANES = 128
_TILE_BYTES = 4 << 20
_VMEM = 56 << 20
_FAR = -1e30


def problem(matrix, hidden) -> str | None:
    """What keeps the kernels from doing this call, None where nothing does."""
    for name, x in (("matrix", matrix), ("hidden", hidden)):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} is {x.dtype}; float32 and bfloat16 are supported"
    if hidden.shape[1] > MAX_HIDDEN:
        return f"hidden size {hidden.shape[1]}; up to {MAX_HIDDEN} is supported"
    return None


def tiles(matrix, hidden, valid: int) -> tuple[int, int]:
    """Targets and ids of a tile."""
    count, size = hidden.shape
    fitting = _TILE_BYTES // (size * 4) // _LANES * _LANES
    ids = min(int(np.clip(fitting, _LANES, 512)), matrix.shape[0])
    return min(int(np.clip(fitting, _LANES, 256)), round_up(count, 16)), ids


def plan(matrix, hidden, valid: int, which: str) -> Plan:
    """Grid and blocks; `which` is `forward`, `by_hidden` or `by_matrix`. No scalar arrays."""
    count, size = hidden.shape
    rows, ids = tiles(matrix, hidden, valid)
    padded = round_up(count, rows)
    by_matrix = which == "by_matrix"
    row = (lambda v, u: (u, 0)) if by_matrix else (lambda u, v: (u, 0))
    column = (lambda v, u: (v, 0)) if by_matrix else (lambda u, v: (v, 0))
    inputs = [
        Operand("hidden", (padded, size), hidden.dtype, (rows, size), row),
        Operand("matrix", matrix.shape, matrix.dtype, (ids, size), column),
        Operand("ids", (padded, 1), jnp.int32, (rows, 1), row),
    ]
    if which != "forward":
        inputs.append(Operand("numbers", (padded, 4), jnp.float32, (rows, 4), row))
    table = pltpu.VMEM((rows, _LANES), jnp.float32)
    outputs, scratch = {
        "forward": (Operand("out", (padded, _LANES), jnp.float32, (rows, _LANES), row), (table,) * 4),
        "by_hidden": (
            Operand("d_hidden", (padded, size), hidden.dtype, (rows, size), row),
            (pltpu.VMEM((rows, size), jnp.float32),),
        ),
        "by_matrix": (
            Operand("d_matrix", matrix.shape, matrix.dtype, (ids, size), column),
            (pltpu.VMEM((ids, size), jnp.float32),),
        ),
    }[which]
    u, v = padded // rows, cdiv(valid, ids)
    return Plan(
        # Ids past the valid ones have a gradient too: it is 0, and has to be written.
        grid=(cdiv(matrix.shape[0], ids), u) if by_matrix else (u, v),
        semantics=("parallel", "arbitrary"),
        inputs=tuple(inputs),
        outputs=(outputs,),
        scratch=scratch,
        vmem_limit=_VMEM,
    )


def _scores(static, widen, hidden, matrix, tile):
    """Scaled logits of a tile, and its ids, `[rows, ids]` each; invalid ids are far below."""
    x, w = hidden[...], matrix[...].astype(hidden.dtype)
    scores = _dot(x, w, (1, 1), widen) * static.scale
    ids = tile * scores.shape[1] + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return jnp.where(ids < static.valid, scores, _FAR), ids


def _dot(x, y, contract, widen):
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    if widen:  # CPUs have no bfloat16 products with float32 sums; the products are the same
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    dims = ((contract[:1], contract[1:]), ((), ()))
    return jax.lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _forward_kernel(hidden, matrix, targets, out, top, total, weighted, chosen, *, static, widen):
    v = pl.program_id(1)

    @pl.when(v == 0)
    def _start():
        top[...] = jnp.full_like(top, _FAR)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)
        chosen[...] = jnp.full_like(chosen, _FAR)

    scores, ids = _scores(static, widen, hidden, matrix, v)
    before, sums = top[:, 0:1], total[:, 0:1]
    highest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    shrink = jnp.exp(before - highest)
    shifted = jnp.maximum(scores - highest, _FAR)
    weights = jnp.exp(shifted)
    # Sums of w (s - top): entropies are differences of like numbers, so they are kept small. Nothing has come before the
    # first tile, and `before` is no number to reckon with there.
    moved = jnp.where(sums > 0, sums * (before - highest), 0.0)
    mean = shrink * (weighted[:, 0:1] + moved) + jnp.sum(weights * shifted, axis=1, keepdims=True)
    sums = shrink * sums + jnp.sum(weights, axis=1, keepdims=True)
    found = jnp.max(jnp.where(ids == targets[...], scores, _FAR), axis=1, keepdims=True)
    for ref, value in ((top, highest), (total, sums), (weighted, mean), (chosen, jnp.maximum(chosen[:, 0:1], found))):
        ref[...] = jnp.broadcast_to(value, ref.shape)

    @pl.when(v == pl.num_programs(1) - 1)
    def _finish():
        log_total = jnp.log(sums)
        lanes = jax.lax.broadcasted_iota(jnp.int32, out.shape, 1)
        normaliser, entropy = highest + log_total, log_total - mean / sums
        log_prob = chosen[:, 0:1] - normaliser
        out[...] = jnp.where(lanes == 0, log_prob, jnp.where(lanes == 1, entropy, normaliser))


def _d_scores(static, widen, hidden, matrix, targets, numbers, tile):
    """Derivative by a tile's logits `[rows, ids]` in the dtype of the hidden states."""
    scores, ids = _scores(static, widen, hidden, matrix, tile)
    g, g_entropy, normaliser, entropy = (numbers[:, i : i + 1] for i in range(4))
    log_law = scores - normaliser
    law = jnp.exp(log_law)
    d = g * ((ids == targets[...]).astype(jnp.float32) - law)
    if static.entropy_gradient:
        d -= g_entropy * law * (log_law + entropy)
    return (jnp.where(ids < static.valid, d, 0.0) * static.scale).astype(hidden.dtype)


def _by_hidden_kernel(hidden, matrix, targets, numbers, out, sums, *, static, widen):
    v = pl.program_id(1)

    @pl.when(v == 0)
    def _start():
        sums[...] = jnp.zeros_like(sums)

    d = _d_scores(static, widen, hidden, matrix, targets, numbers, v)
    # What lies past the projection's end may be NaN, and 0 x NaN is NaN.
    row = v * matrix.shape[0] + jax.lax.broadcasted_iota(jnp.int32, (matrix.shape[0], 1), 0)
    w = jnp.where(row < static.valid, matrix[...], jnp.zeros((), matrix.dtype)).astype(hidden.dtype)
    sums[...] += _dot(d, w, (1, 0), widen)

    @pl.when(v == pl.num_programs(1) - 1)
    def _finish():
        out[...] = sums[...].astype(out.dtype)


def _by_matrix_kernel(hidden, matrix, targets, numbers, out, sums, *, static, widen):
    u = pl.program_id(1)

    @pl.when(u == 0)
    def _start():
        sums[...] = jnp.zeros_like(sums)

    d = _d_scores(static, widen, hidden, matrix, targets, numbers, pl.program_id(0))
    sums[...] += _dot(d, hidden[...], (0, 0), widen)

    @pl.when(u == pl.num_programs(1) - 1)
    def _finish():
        out[...] = sums[...].astype(out.dtype)


_KERNELS = {"forward": _forward_kernel, "by_hidden": _by_hidden_kernel, "by_matrix": _by_matrix_kernel}


def run(which: str, static: Static, interpret: Any, matrix, hidden, target_ids, numbers=None) -> jax.Array:
    """One of the kernels, on padded rows: `[U, 128]` (log-prob, entropy, normaliser, …), `[U, H]`, or `[V, H]`."""
    layout = plan(matrix, hidden, static.valid, which)
    count, padded = hidden.shape[0], layout.inputs[0].shape[0]
    pad = lambda x, fill=0: jnp.pad(x, ((0, padded - count), (0, 0)), constant_values=fill)  # noqa: E731
    arrays = [pad(hidden), matrix, pad(target_ids[:, None].astype(jnp.int32), -1)]
    if numbers is not None:
        arrays.append(pad(numbers))
    kernel = functools.partial(_KERNELS[which], static=static, widen=interpret is not False)
    (out,) = layout.call(kernel, (), arrays, name=f"log_probs_{which}", interpret=interpret)
    return out if which == "by_matrix" else out[:count]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def token_log_probs(static: Static, interpret: Any, matrix: jax.Array, hidden: jax.Array, target_ids: jax.Array):
    """Log-probs and entropies, float32 `[U]` each. `static.by_row` must be true; `interpret` as in `verify_attention`."""
    return _fwd(static, interpret, matrix, hidden, target_ids)[0]


def _fwd(static, interpret, matrix, hidden, target_ids):
    out = run("forward", static, interpret, matrix, hidden, target_ids)
    log_probs, entropy, normaliser = out[:, 0], out[:, 1], out[:, 2]
    return (log_probs, entropy), (matrix, hidden, target_ids, normaliser, entropy)


def _bwd(static, interpret, saved, cotangents):
    matrix, hidden, target_ids, normaliser, entropy = saved
    numbers = jnp.stack([*cotangents, normaliser, entropy], axis=1)
    d_hidden, d_matrix = (
        run(which, static, interpret, matrix, hidden, target_ids, numbers) for which in ("by_hidden", "by_matrix")
    )
    return d_matrix, d_hidden, None


token_log_probs.defvjp(_fwd, _bwd)
