"""Where a drafter's training begins: at the best linear prediction, and in units in which every weight counts alike.

A fresh drafter knows nothing, and most of what it has to learn first is linear: how the next hidden state follows from the last
one and from the next token's embedding. That has a closed form (ridge regression), so the fusing projection starts there and the
layer's two branches start at zero: the whole drafter is that regression until it learns better.

Channels of hidden states differ in size (SmolLM2-135M: root mean squares from 0.7 to 22) and those of embeddings are smaller
still (0.1). Adam moves every weight by about the same amount a step, far too much for some and nothing for others: from the
regression it first lost what the regression knew. `units` says how large a step of each weight is natural, and `in_units` makes
any optimizer take its steps, and clip its gradients, in them.

An `eagle3` drafter fuses several hidden states first. That fusion begins as the best linear prediction of the final state at the
same place (which it is exactly, where the last layer is among those read), and the rest as above, on fused states.

Shapes: `H` hidden size, `K` layers that are fused.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adrl_jax.drafter.warmup import Lesson
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import embed_tokens, final_hidden
from adrl_jax.speculation import eagle
from adrl_jax.speculation.fusion import FUSE, fused, stacked


class Moments(NamedTuple):
    """Second moments of (embedding, hidden state) and the next hidden state over entries, float64.

    Attributes:
        inputs: `[2 H, 2 H]`, sum of x x^T with x = [embedding, hidden state], as the fusing projection reads it.
        outputs: `[2 H, H]`, sum of x y^T with y the next hidden state.
        squares: `[H]`, sum of y^2.
        count: how many entries.
    """

    inputs: np.ndarray
    outputs: np.ndarray
    squares: np.ndarray
    count: int


class Fusion(NamedTuple):
    """Attributes: kernel float32 `[K H, H]`; reads float64 `[K H]`, root mean squares of what is fused."""

    kernel: np.ndarray
    reads: np.ndarray


def fusion(config: ModelConfig, lessons: Sequence[Lesson], ridge: float = 1e-6) -> Fusion:
    """The fusing projection of least squares from the states that `eagle3` reads to the final one at the same place.

    Args:
        config: the target's, with the drafter's taps.

    Raises:
        ValueError: there is no token.
    """

    @jax.jit
    def sums(segment_ids, hidden):
        real = (segment_ids != 0).reshape(-1, 1)
        x, y = (jnp.where(real, z.reshape(real.shape[0], -1), 0.0).astype(jnp.float32) for z in
                (stacked(hidden, config), final_hidden(hidden, config)))  # fmt: skip
        return x.T @ x, x.T @ y, jnp.sum(real)

    square = cross = count = 0
    for lesson in lessons:
        found = jax.device_get(sums(lesson.batch.segment_ids, lesson.hidden))
        square, cross, count = (a + np.asarray(b, np.float64) for a, b in zip((square, cross, count), found, strict=True))
    if not count:
        raise ValueError("the lessons hold no token to begin from")
    power = np.trace(square) / len(square)
    kernel = np.linalg.solve(square + ridge * power * np.eye(len(square)), cross)
    return Fusion(kernel.astype(np.float32), _root_mean_square(np.diag(square), int(count)))


def moments(params: Any, config: ModelConfig, lessons: Sequence[Lesson], fuse: Fusion | None = None) -> Moments:
    """Those of every entry of some lessons, prompts included; entries are triples as `eagle.inputs` builds them.

    Args:
        fuse: for an `eagle3` drafter, whose entries hold fused states; `config` then has its taps.

    Raises:
        ValueError: there is no entry.
    """

    @jax.jit
    def sums(embedding, batch, hidden):
        places = jnp.broadcast_to(jnp.arange(batch.token_ids.shape[1], dtype=jnp.int32), batch.token_ids.shape)
        sources = eagle.packed_sources(places.shape[1], batch.source_index, batch.target_index, batch.target_mask)
        before, ids, _ = eagle.inputs(hidden, batch.token_ids, batch.positions, sources, places)
        real = (eagle.entry_segments(batch.segment_ids) != 0).reshape(-1, 1)
        if fuse is not None:
            before = fused({FUSE: {"kernel": jnp.asarray(fuse.kernel)}}, before, config)
        hidden = final_hidden(hidden, config)
        width = hidden.shape[-1]
        x = jnp.concatenate([embed_tokens(embedding, ids, config), before], axis=-1).reshape(-1, 2 * width)
        x = jnp.where(real, x, 0.0).astype(jnp.float32)
        y = jnp.where(real, hidden.reshape(-1, width), 0.0).astype(jnp.float32)
        return x.T @ x, x.T @ y, jnp.sum(jnp.square(y), axis=0), jnp.sum(real)

    total = [0.0, 0.0, 0.0, 0]
    for lesson in lessons:
        found = jax.device_get(sums(params["embedding"], lesson.batch, lesson.hidden))
        total = [a + np.asarray(b, np.float64) for a, b in zip(total, found, strict=True)]
    if not total[3]:
        raise ValueError("the lessons hold no entry to begin from")
    return Moments(total[0], total[1], total[2], int(total[3]))


def regression(found: Moments, ridge: float = 1e-4) -> np.ndarray:
    """The fusing projection `[2 H, H]` of least squares, with `ridge` times the mean input power on the diagonal.

    Raises:
        ValueError: `ridge` is not positive.
    """
    if not ridge > 0:
        raise ValueError(f"ridge={ridge!r} must be > 0")
    size = len(found.inputs)
    power = np.trace(found.inputs) / size
    return np.linalg.solve(found.inputs + ridge * power * np.eye(size), found.outputs)


def begin(trained: Any, config: ModelConfig, found: Moments, ridge: float = 1e-4, fuse: Fusion | None = None) -> Any:
    """Parameters to train from: the regression, both branches of the layer at zero, and what reads the residual stream scaled so
    that all its channels are heard alike.

    Args:
        trained: fresh parameters, `eagle.split(…)[0]`; the branches keep their random inner weights.
        config: the target's.
        fuse: for an `eagle3` drafter.
    """
    own, writes = units(trained, found, fuse), _root_mean_square(found.squares, found.count)
    layer = {name: dict(value) for name, value in trained["layer"].items()}
    layer["attn"]["qkv"] = jax.tree.map(jnp.multiply, layer["attn"]["qkv"], own["layer"]["attn"]["qkv"])
    heard = np.sqrt(np.mean(np.square(writes))) / writes - config.norm_offset
    layer["mlp_norm"]["weight"] = jnp.asarray(heard, jnp.float32)
    for path in _writers(trained):
        node = layer
        for name in path[:-1]:
            node = node[name]
        # A norm adds its offset to its weight: minus the offset is nothing.
        nothing = -config.norm_offset if "norm" in path[-1] else 0.0
        node[path[-1]] = jax.tree.map(lambda x, value=nothing: jnp.full_like(x, value), node[path[-1]])
    fusing = {} if fuse is None else {FUSE: {"kernel": jnp.asarray(fuse.kernel)}}
    return {**trained, **fusing, "fc": {"kernel": jnp.asarray(regression(found, ridge), jnp.float32)}, "layer": layer}


def units(trained: Any, found: Moments, fuse: Fusion | None = None) -> Any:
    """How large a step of each weight is natural, shaped like `trained`, float32.

    A weight that reads a channel counts in inverse root mean squares of that channel, one that writes a channel in root mean
    squares of it. What reads normalised inputs counts in ones.
    """
    reads = _root_mean_square(np.diag(found.inputs), found.count)
    writes = _root_mean_square(found.squares, found.count)
    heard = np.sqrt(np.mean(np.square(writes))) / writes
    writers = {("layer", *path) for path in _writers(trained)}

    def unit(path, x):
        names = tuple(key.key for key in path)
        if names[0] == "fc":
            own = writes / reads[:, None]
        elif names[0] == FUSE:
            own = writes / fuse.reads[:, None]
        elif names[:-1] in writers:
            own = writes
        elif names == ("layer", "attn", "qkv", "kernel"):
            own = 1.0 / writes[:, None]
        elif names == ("layer", "mlp_norm", "weight"):
            own = heard
        else:
            own = 1.0
        return jnp.asarray(np.broadcast_to(own, x.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(unit, trained)


def _writers(trained: Any) -> tuple[tuple[str, ...], ...]:
    """What writes to the residual stream: the last projection of each branch, or the norm behind it."""
    if "post_attn_norm" in trained["layer"]:
        return ("post_attn_norm",), ("post_mlp_norm",)
    return ("attn", "o"), ("mlp", "down")


def _root_mean_square(squares: np.ndarray, count: int) -> np.ndarray:
    """Of each channel; a channel that is silent counts as a thousandth of the mean one."""
    found = np.sqrt(squares / count)
    return np.maximum(found, 1e-3 * max(found.mean(), 1e-30))


def in_units(optimizer: optax.GradientTransformation, own: Any) -> optax.GradientTransformationExtraArgs:
    """`optimizer` for weights counted in `own`: it sees the gradients and makes the steps of weight / unit."""
    inner = optax.with_extra_args_support(optimizer)

    def update(grads, state, params=None, **extra):
        counted = None if params is None else jax.tree.map(jnp.divide, params, own)
        steps, state = inner.update(jax.tree.map(jnp.multiply, grads, own), state, counted, **extra)
        return jax.tree.map(jnp.multiply, steps, own), state

    return optax.GradientTransformationExtraArgs(inner.init, update)
