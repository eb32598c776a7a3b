"""The model in float64, text by text: an oracle for what packed rows and caches compute in float32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.models import transformer
from adrl_jax.models.kv_cache import masked_attention


@functools.cache
def _forward64(config, length):
    wide = dataclasses.replace(config, dtype="float64")
    places = jnp.arange(length, dtype=jnp.int32)[None]

    def attend(q, k, v, *, layer, window, cache):
        seen = places[..., None] >= places[:, None]
        return masked_attention(q, k.transpose(0, 2, 3, 1), v.swapaxes(1, 2), seen), cache

    def run(params, ids):
        hidden, _ = transformer.Transformer(wide).apply({"params": params}, ids[None], places, attend=attend)
        return transformer.logits(params, hidden[0])

    return jax.jit(run)


def all_logits(config, params, token_ids, length):
    """Float64 logits after each token, from one program: the text is padded to `length`."""
    ids = np.zeros(length, np.int32)
    ids[: len(token_ids)] = token_ids
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), params)
        return np.asarray(_forward64(config, length)(wide, ids))[: len(token_ids)]
