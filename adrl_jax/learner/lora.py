"""Low-rank adapters on the matrices of a policy (LoRA, arXiv 2106.09685): a fraction of the optimizer's memory.

Parameters with adapters are a pair {"base": frozen weights, "adapters": {path: {"a": [in, r], "b": [r, out]}}}; the weights that act
are  base + (alpha / r) a b.  Everything that runs the model, publishing included, sees merged weights, so no other code knows of
adapters. Plain parameters pass through every function here unchanged.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

_BASE, _ADAPTERS, _SCALE = "base", "adapters", "scale"


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Attributes: rank r >= 1; alpha > 0, the strength: updates are scaled by alpha / rank."""

    rank: int = 8
    alpha: float = 16.0

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank={self.rank!r} must be a positive integer")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"alpha={self.alpha!r} must be finite and positive")


def is_lora(params: Any) -> bool:
    return isinstance(params, Mapping) and set(params) == {_BASE, _ADAPTERS, _SCALE}


def init(params: Any, config: LoraConfig, key: jax.Array) -> Any:
    """Adapters on every `kernel` `[in, out]` of the layers; `b` is 0, so that nothing changes at first.

    Raises:
        ValueError: the rank is not below both sides of a matrix.
    """
    adapters = {}
    for number, (path, leaf) in enumerate(_kernels(params)):
        rows, columns = leaf.shape
        if config.rank >= min(rows, columns):
            raise ValueError(f"rank={config.rank} must be below both sides of {path}, {rows} x {columns}")
        a = jax.random.normal(jax.random.fold_in(key, number), (rows, config.rank), jnp.float32) / jnp.sqrt(1.0 * rows)
        adapters[path] = {"a": a, "b": jnp.zeros((config.rank, columns), jnp.float32)}
    return {_BASE: params, _ADAPTERS: adapters, _SCALE: jnp.float32(config.alpha / config.rank)}


def trained(params: Any) -> Any:
    """The leaves that an optimizer sees."""
    return params[_ADAPTERS] if is_lora(params) else params


def with_trained(params: Any, leaves: Any) -> Any:
    """`params` with the leaves that an optimizer has moved."""
    return {**params, _ADAPTERS: leaves} if is_lora(params) else leaves


def merge(params: Any) -> Any:
    """The weights that act, in the layout of a plain policy."""
    return _merged(params, params[_ADAPTERS]) if is_lora(params) else params


def merge_for_gradient(params: Any) -> tuple[Any, Callable[[Any], Any]]:
    """`merge(params)`, and the map from gradients by merged weights to gradients by the trained leaves."""
    if not is_lora(params):
        return params, lambda grads: grads
    whole, pull = jax.vjp(lambda adapters: _merged(params, adapters), params[_ADAPTERS])
    return whole, lambda grads: pull(grads)[0]


def _merged(params: Any, adapters: Any) -> Any:
    def add(path, leaf):
        pair = adapters.get(_name(path))
        return leaf if pair is None else leaf + params[_SCALE] * (pair["a"] @ pair["b"]).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(add, params[_BASE])


def _name(path: Any) -> str:
    return "/".join(str(getattr(k, "key", k)) for k in path)


def _kernels(params: Any) -> list[tuple[str, jax.Array]]:
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return [(_name(path), leaf) for path, leaf in leaves if _name(path).endswith("/kernel") and leaf.ndim == 2]
