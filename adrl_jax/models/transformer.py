"""One decoder-only transformer for all families, as Flax Linen modules with the attention passed in.

Shapes: `B` rows, `T` tokens a row, `H` hidden size, `N` query heads, `K` key-value heads, `D` head size, `V` vocabulary.

The model knows neither caches nor packing. It computes queries, keys and values and calls
`attend(q, k, v, layer=..., window=..., cache=...) -> (out, cache)`:

* `q` is `[B, T, N, D]`, already rotated and scaled, so scores are plain dot products;
* `k`, `v` are `[B, T, K, D]`, keys already rotated;
* `out` is `[B, T, N, D]`; `cache` is any pytree and is handed from layer to layer.

Weights are stored `[in, out]` and named `kernel`, with q|k|v and gate|up fused: one matrix product each. An engine serves
large ones as `kernel_t`, `[out, in]` (`engine_layout`).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from adrl_jax.models.families import ModelConfig, RopeScaling
from adrl_jax.models.norm import Norm
from adrl_jax.models.projection import is_large, project

Attend = Callable[..., tuple[jax.Array, Any]]

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def rope_frequencies(dim: int, theta: float, scaling: RopeScaling | None = None) -> jax.Array:
    """Inverse wavelengths of the rotary embedding, float32 `[dim // 2]` in radians per position (RoFormer, eq. 15)."""
    freqs = theta ** -(jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    wavelength = 2 * jnp.pi / freqs
    low = scaling.original_positions / scaling.low_freq_factor
    high = scaling.original_positions / scaling.high_freq_factor
    smooth = (scaling.original_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * freqs / scaling.factor + smooth * freqs
    return jnp.where(wavelength > low, freqs / scaling.factor, jnp.where(wavelength < high, freqs, blended))


def rotation(positions: jax.Array, dim: int, theta: float, scaling: RopeScaling | None) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 `[B, T, 1, dim // 2]` each, for integer `positions` `[B, T]`."""
    angles = positions[..., None, None].astype(jnp.float32) * rope_frequencies(dim, theta, scaling)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Applies the half-split rotation to the first `2 * cos.shape[-1]` channels of `x` `[B, T, heads, D]`."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


class Dense(nn.Module):
    """`x @ kernel (+ bias)` with the kernel stored `[in, out]`, or as `kernel_t` `[out, in]`."""

    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.has_variable("params", "kernel_t"):
            y = project(x, self.get_variable("params", "kernel_t"))
        else:
            kernel = self.param("kernel", nn.initializers.normal(0.02), (x.shape[-1], self.features))
            y = x @ kernel.astype(x.dtype)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (self.features,)).astype(x.dtype)
        return y


class Attention(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x, rope, *, attend: Attend, layer: int, cache: Any):
        c = self.config
        batch, length, _ = x.shape
        qkv = Dense((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.qkv_bias, name="qkv")(x)
        qkv = qkv.reshape(batch, length, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = jnp.split(qkv, [c.num_heads, c.num_heads + c.num_kv_heads], axis=2)
        if c.qk_norm:
            q = Norm("rms", c.norm_eps, c.norm_offset, name="q_norm")(q)
            k = Norm("rms", c.norm_eps, c.norm_offset, name="k_norm")(k)
        q, k = rotate(q, *rope) * c.scale, rotate(k, *rope)
        window = c.sliding_window if c.is_local(layer) else None
        out, cache = attend(q, k, v, layer=layer, window=window, cache=cache)
        out = out.reshape(batch, length, c.num_heads * c.head_dim).astype(x.dtype)
        return Dense(c.hidden_size, c.dense_bias, name="o")(out), cache


class Mlp(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x):
        c = self.config
        act = _ACTIVATIONS[c.activation]
        if c.gated_mlp:
            gate, up = jnp.split(Dense(2 * c.intermediate_size, c.dense_bias, name="gate_up")(x), 2, axis=-1)
            x = act(gate) * up
        else:
            x = act(Dense(c.intermediate_size, c.dense_bias, name="up")(x))
        return Dense(c.hidden_size, c.dense_bias, name="down")(x)


class DecoderLayer(nn.Module):
    """One block. `skip_input_norm` is what EAGLE's single layer does, whose input is already a fused projection."""

    config: ModelConfig
    skip_input_norm: bool = False

    @nn.compact
    def __call__(self, x, rope, *, attend: Attend, layer: int, cache: Any):
        c = self.config

        def norm(name):
            return Norm(c.norm, c.norm_eps, c.norm_offset, name=name)

        attn_in = x if self.skip_input_norm else norm("input_norm")(x)
        a, cache = Attention(c, name="attn")(attn_in, rope, attend=attend, layer=layer, cache=cache)
        if c.parallel_residual:
            return x + a + Mlp(c, name="mlp")(norm("mlp_norm")(x)), cache
        x = x + (norm("post_attn_norm")(a) if c.post_norms else a)
        m = Mlp(c, name="mlp")(norm("mlp_norm")(x))
        return x + (norm("post_mlp_norm")(m) if c.post_norms else m), cache


class Transformer(nn.Module):
    """Token ids in, final-norm hidden states out; `logits` projects them onto the vocabulary."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        *,
        attend: Attend,
        cache: Any = None,
        remat: bool = False,
    ) -> tuple[jax.Array, Any]:
        """Runs all layers.

        Args:
            tokens: int32 `[B, T]`.
            positions: int32 `[B, T]`, the rotary position of each token within its own sequence.
            attend: see the module's docstring.
            cache: any pytree, handed to `attend` layer by layer.
            remat: recompute each layer in the backward pass instead of storing its activations.

        Returns:
            hidden states after the final norm, `[B, T, H]` in the compute dtype, and the cache. With `config.taps` those after
            each tapped layer stand behind them, `[B, T, (1 + taps) H]`.
        """
        c = self.config
        embedding = self.param("embedding", nn.initializers.normal(0.02), (c.vocab_size, c.hidden_size))
        if not c.tie_embeddings and not self.has_variable("params", "head_t"):
            self.param("head", nn.initializers.normal(0.02), (c.hidden_size, c.vocab_size))
        x = embed_tokens(embedding, tokens, c)
        ropes = model_ropes(c, positions)
        tapped = []
        for i in range(c.num_layers):
            layer = DecoderLayer(c, name=f"layer_{i}")

            def run(module, x, rope, cache, i=i):
                return module(x, rope, attend=attend, layer=i, cache=cache)

            rope = ropes[1] if c.is_local(i) else ropes[0]
            x, cache = (nn.remat(run) if remat else run)(layer, x, rope, cache)
            if i + 1 in c.taps:
                tapped.append(x)
        x = Norm(c.norm, c.norm_eps, c.norm_offset, name="final_norm")(x)
        return jnp.concatenate([x, *tapped], axis=-1) if tapped else x, cache


def final_hidden(hidden: jax.Array, config: ModelConfig) -> jax.Array:
    """The final-norm ones `[..., H]` of what a pass returns."""
    return hidden[..., : config.hidden_size] if config.taps else hidden


def model_ropes(config: ModelConfig, positions: jax.Array):
    """(global, local) pairs of (cos, sin) for `positions` `[B, T]`; local is None without sliding layers."""
    dim = int(config.head_dim * config.rotary_fraction)
    everywhere = rotation(positions, dim, config.rope_theta, config.rope_scaling)
    local = None if config.sliding_window is None else rotation(positions, dim, config.local_rope_theta, None)
    return everywhere, local


def embed_tokens(embedding: jax.Array, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """Rows of the table `[V, H]` for `tokens` `[...]`, scaled as the family does, in the compute dtype."""
    x = jnp.take(embedding, tokens, axis=0, mode="clip").astype(config.compute_dtype)
    if config.embed_scale != 1.0:
        x = x * jnp.asarray(config.embed_scale, config.compute_dtype)
    return x


def logits(params: Any, hidden: jax.Array) -> jax.Array:
    """Logits `[..., V]`, at least float32, of final-norm `hidden` `[..., H]`; what stands behind (of taps) is left out.

    Uses `params["head"]` `[H, V]` where present (untied models), `params["head_t"]` `[V, H]` (the same, served), else the
    embedding.
    """
    width = params["head"].shape[0] if "head" in params else params.get("head_t", params["embedding"]).shape[1]
    hidden = hidden if hidden.shape[-1] == width else hidden[..., :width]
    if "head" in params:
        out = hidden @ params["head"].astype(hidden.dtype)
    else:
        out = project(hidden, params.get("head_t", params["embedding"]))
    return out.astype(jnp.promote_types(out.dtype, jnp.float32))


def init_params(config: ModelConfig, key: jax.Array, dtype=jnp.float32) -> Any:
    """Fresh parameters, drawn with `key` (consumed), as a nested dict of arrays."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    variables = Transformer(config).init(key, tokens, tokens, attend=lambda q, k, v, *, layer, window, cache: (q, cache))
    return jax.tree.map(lambda x: x.astype(dtype), variables["params"])


def engine_layout(params: Any, config: ModelConfig) -> Any:
    """A copy of a policy's or a drafter's `params` for serving: in the compute dtype, large matrices stored `[out, in]`.

    The result shares no buffer with `params`: the learner may donate its own.
    """
    dtype = config.compute_dtype

    def served(tree):
        if not isinstance(tree, Mapping):
            floating = jnp.issubdtype(tree.dtype, jnp.floating)  # ids are not rounded
            return jnp.array(tree, dtype=dtype if floating else None, copy=True)
        out = {}
        for name, value in tree.items():
            if name in ("kernel", "head") and is_large(value):
                out[f"{name}_t"] = _transposed(value, dtype)
            else:
                out[name] = served(value)
        return out

    return served(params)


@functools.partial(jax.jit, static_argnums=1)
def _transposed(x: jax.Array, dtype) -> jax.Array:
    # Compiled: one pass over memory, where the operations one by one would make two copies.
    return x.T.astype(dtype)
