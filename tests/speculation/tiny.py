"""Small targets of every family, and running them over whole rows, for the drafters' tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.models import transformer
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import cached_attention, init_cache
from adrl_jax.sampling import noise

SIZES = dict(vocab_size=40, hidden_size=24, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
LLAMA = ModelConfig("llama", **SIZES)
FAMILIES = {
    "llama": LLAMA,
    "qwen2": ModelConfig("qwen2", **SIZES, qkv_bias=True, tie_embeddings=False),
    "qwen3": ModelConfig("qwen3", **SIZES, qk_norm=True),
    "gemma3": ModelConfig(
        "gemma3", **SIZES, qk_norm=True, norm_offset=1.0, activation="gelu_tanh", embed_scale=4.9, post_norms=True,
        sliding_window=4, sliding_pattern=2,
    ),
    "gpt_neox": ModelConfig(
        "gpt_neox", **{**SIZES, "num_kv_heads": 4}, tie_embeddings=False, qkv_bias=True, dense_bias=True, norm="layer",
        activation="gelu", gated_mlp=False, parallel_residual=True, rotary_fraction=0.25,
    ),
}  # fmt: skip


def _random(shapes, seed, spread):
    """Arrays of the given shapes: weights normal, everything else one. Drawn with numpy, which compiles nothing."""
    rng = np.random.default_rng(seed)

    def draw(x):
        return jnp.asarray(rng.normal(size=x.shape) * spread if len(x.shape) > 1 else np.ones(x.shape), x.dtype)

    return jax.tree.map(draw, shapes)


@functools.cache
def target_params(config, seed=0):
    """Ten times the usual spread, so that laws are peaked and differences show; in engine layout."""
    params = _random(jax.eval_shape(lambda key: transformer.init_params(config, key), jax.random.key(0)), seed, 0.2)
    return {"head": params["embedding"].T, **params}


@functools.cache
def drafter_params(drafter, seed=0):
    return _random(jax.eval_shape(drafter.init_params, jax.random.key(0)), seed, 0.12)


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(config, params, tokens):
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    cache = init_cache(config, *tokens.shape)
    model = transformer.Transformer(config)
    return model.apply({"params": params}, tokens, places, attend=cached_attention(places), cache=cache)[0]


def random_rows(rows, capacity, vocab=SIZES["vocab_size"], seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab, (rows, capacity)), jnp.int32)


def request_keys(rows, seed=0):
    return jnp.asarray(noise.request_keys(seed, np.arange(rows), 0, 0))
