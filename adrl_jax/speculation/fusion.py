"""Which of the target's layers EAGLE-3 reads, and how they become one hidden state (arXiv 2503.01840, §3.1).

Hidden states of a target with taps are laid out `[..., (1 + taps) H]`: the final-norm ones first, then those after each tapped
layer, low to high (`models.transformer`).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from adrl_jax.models.families import ModelConfig
from adrl_jax.models.projection import project

FUSE = "fuse"
"""Key of the fusing projection among a drafter's parameters: `{"kernel": [K H, H]}` for K layers read."""

_SHALLOW = 7  # layers below which the paper's choice runs into itself


def layers_read(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer, as numbers of layers that have run, ascending.

    2, half, and 3 before the end, as the paper's code has it. In a model of fewer than 7 layers those coincide or turn round; then
    the first, the middle and the last (its final-norm states), which are two for two layers.

    Raises:
        ValueError: the model has one layer: there is nothing to fuse.
    """
    if num_layers < 2:
        raise ValueError(f"num_layers={num_layers!r}: an eagle3 drafter reads several layers of the target; choose eagle")
    if num_layers >= _SHALLOW:
        return 2, num_layers // 2, num_layers - 3
    return tuple(sorted({1, (num_layers + 1) // 2, num_layers}))


def taps_of(num_layers: int) -> tuple[int, ...]:
    """Those of `layers_read` that are not the last, whose states there are anyway."""
    return tuple(n for n in layers_read(num_layers) if n < num_layers)


def stacked(hidden: jax.Array, config: ModelConfig) -> jax.Array:
    """What is fused, `[..., K H]`, of hidden states `[..., (1 + taps) H]`, low to high."""
    tapped = hidden[..., config.hidden_size :]
    if config.num_layers in layers_read(config.num_layers):
        tapped = jnp.concatenate([tapped, hidden[..., : config.hidden_size]], axis=-1)
    return tapped


def fused(params: Mapping[str, Any], hidden: jax.Array, config: ModelConfig) -> jax.Array:
    """One hidden state `[..., H]` of several: `params[FUSE]` applied to `stacked`."""
    x, weights = stacked(hidden, config), params[FUSE]
    return project(x, weights["kernel_t"]) if "kernel_t" in weights else x @ weights["kernel"].astype(x.dtype)
