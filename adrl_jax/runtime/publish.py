"""Versioned, immutable snapshots of what the engine serves.

The learner gives its buffers away at every update, so a snapshot never shares one with it. Each snapshot carries a
version and a fingerprint of policy and drafter: the policy's changes by updates only, the drafter's by its own.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from adrl_jax.checkpoint import named_arrays
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import engine_layout
from adrl_jax.runtime.memory import release_freed


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """One published pair of policy and drafter.

    Attributes:
        params: the policy in the engine's layout.
        version: policy updates behind it.
        drafter_params: by drafter name.
        drafter_version: drafter updates behind it.
        fingerprint: of the learner's policy weights, 16 hex digits.
        drafter_fingerprint: of the trained drafter's weights; empty where none is trained.
    """

    params: Any
    version: int
    drafter_params: Mapping[str, Any]
    drafter_version: int
    fingerprint: str
    drafter_fingerprint: str


def snapshot(
    params: Any,
    version: int,
    config: ModelConfig,
    *,
    drafter: Any = None,
    drafter_version: int = 0,
    drafter_name: str = "eagle",
    others: Mapping[str, Any] | None = None,
    device: jax.Device | None = None,
) -> Snapshot:
    """Copies the learner's weights for serving.

    Args:
        params: float32 master weights.
        version: of them.
        config: the policy's; its dtype is what is served.
        drafter: the trained drafter's weights, or None.
        drafter_version: of them.
        drafter_name: under which the engine knows it.
        others: weights of drafters that are not trained here, served as they are.
        device: where they are served, where that is not where they are learnt: laid out by one program on the learner's
            devices, then sent over.
    """

    def laid_out(tree):
        if device is None:
            return engine_layout(tree, config)
        return jax.device_put(_one_program(tree, config), device)

    release_freed()  # what the update left; below, what the copies leave
    drafters = dict(others or {})
    if drafter is not None:
        drafters[drafter_name] = laid_out(drafter)
    served = jax.block_until_ready(laid_out(params))
    shot = Snapshot(
        served,
        int(version),
        drafters,
        int(drafter_version),
        fingerprint(params),
        "" if drafter is None else fingerprint(drafter),
    )
    release_freed()
    return shot


_one_program = jax.jit(engine_layout, static_argnums=1)


def fingerprint(tree: Any) -> str:
    """16 hex digits that change when any bit of any leaf, a leaf's name or its dtype changes (not a cryptographic hash)."""
    return fingerprint_later(tree)()


def fingerprint_later(tree: Any) -> Callable[[], str]:
    """`fingerprint`, asked for now and read later, from any thread: the tree's buffers may be given away meanwhile."""
    sums = named_arrays(_checksums(tree))
    facts = {name: f"{name} {leaf.dtype} {leaf.shape}" for name, leaf in named_arrays(tree).items()}

    def read() -> str:
        digest = hashlib.sha256()
        for name, fact in facts.items():
            digest.update(f"{fact} {int(sums[name])};".encode())
        return digest.hexdigest()[:16]

    return read


@jax.jit
def _checksums(tree: Any) -> Any:
    return jax.tree.map(_checksum, tree)


def _checksum(leaf: jax.Array) -> jax.Array:
    """Wrapping uint32 sum of all words, each multiplied by an odd number of its place, so that order counts."""
    bits = leaf.reshape(-1)
    if not jnp.issubdtype(bits.dtype, jnp.integer):
        bits = jax.lax.bitcast_convert_type(bits, {2: jnp.uint16, 4: jnp.uint32}[bits.dtype.itemsize])
    place = jax.lax.iota(jnp.uint32, bits.size) * jnp.uint32(0x9E3779B1) | jnp.uint32(1)
    return jnp.sum(bits.astype(jnp.uint32) * place, dtype=jnp.uint32)
