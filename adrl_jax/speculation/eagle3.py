"""EAGLE-3 drafter: EAGLE's layer on a fusion of low, middle and high hidden states of the target (arXiv 2503.01840).

    entry e = (fusion of the target's states at e, token e + 1, rotary position e)  ->  predicted state e + 1

What it predicts stands where the fused state stood when it is fed back, and the target's own projection makes a law of it; it is
trained on what serving feeds it (`drafter.unroll`), by the laws alone (feature weight 0). The embedding and the projection stay the
*current* target's, where the paper trains a head of its own that no policy update would reach.

Everything else is `Eagle`'s: triples, entries, draft vocabulary, trees.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from adrl_jax.speculation.eagle import Eagle
from adrl_jax.speculation.fusion import FUSE, layers_read, taps_of


@dataclasses.dataclass(frozen=True)
class Eagle3(Eagle):
    """The drafter. The target that serves it keeps the states of `taps` (the engine sees to it, see `Eagle.target`).

    Raises:
        ValueError: the target has one layer.
    """

    name: str = "eagle3"

    def __post_init__(self):
        super().__post_init__()
        layers_read(self.config.num_layers)

    @property
    def taps(self) -> tuple[int, ...]:
        """After how many layers the target's states are read beside the last."""
        return taps_of(self.config.num_layers)

    def init_params(self, key: jax.Array) -> Any:
        """As `Eagle.init_params`, and the fusing projection: the mean of what it reads."""
        width, count = self.config.hidden_size, len(layers_read(self.config.num_layers))
        mean = jnp.tile(jnp.eye(width, dtype=jnp.float32), (count, 1)) / count
        return {**super().init_params(key), FUSE: {"kernel": mean}}
