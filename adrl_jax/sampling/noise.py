"""Counter-based noise: every random number has a name, so no number depends on batch, slot, chunking or device.

The name is (run seed, prompt id, visit, sample, absolute position, role, vocabulary id). Three layers turn it into bits:

1. `request_keys` folds seed, prompt id, visit and sample, one after the other, with Threefry-2x32 (Salmon et al. 2011,
   "Parallel random numbers: as easy as 1, 2, 3"). Indices are never added: 3 + 1 and 4 + 0 must not meet.
2. `position_keys` folds position and role, again with Threefry.
3. `bits` hashes (position key, vocabulary id). This layer runs over the whole vocabulary for every token, so it is a cheap
   32-bit integer hash of four multiplications with both key words mixed in, not a cipher. Kernels run it too, so it is
   defined in `adrl_kernels.noise`.

The *integer bits* are the contract: an accelerated kernel must reproduce them exactly. What is computed from them
(`gumbel`, `uniform`) may differ in the last float bits.

All functions of keys take and return either numpy or JAX arrays. Shapes: `B` rows, `N` positions, `V` vocabulary size.
"""

import enum

import jax
import jax.numpy as jnp
import numpy as np
from adrl_kernels.noise import exponential_of_bits, hash_ids

__all__ = [
    "Role",
    "bits",
    "exponential_of_bits",
    "gumbel",
    "hash_ids",
    "position_keys",
    "request_keys",
    "threefry2x32",
    "uniform",
]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class Role(enum.IntEnum):
    """What a position's noise is for. Streams of different roles are independent.

    `TARGET` draws the target's own token (and, coupled, the drafter's); `DRAFT` draws drafts, `ACCEPT` is the coin and
    `RESIDUAL` the replacement draw of rejection sampling.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def threefry2x32(key, counter):
    """Threefry-2x32 with 20 rounds.

    Args:
        key, counter: pairs of uint32 arrays of the same kind (numpy or JAX) that broadcast against each other.

    Returns:
        A pair of uint32 arrays.
    """
    k0, k1 = key
    schedule = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = counter[0] + k0, counter[1] + k1
    for group in range(5):
        for r in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(r)) | (x1 >> np.uint32(32 - r))) ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def _words(name: str, values) -> tuple[np.ndarray, np.ndarray]:
    """Low and high 32-bit words of non-negative integers below 2**64."""
    array = np.atleast_1d(np.asarray(values))
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers in [0, 2**64), got dtype {array.dtype}")
    if array.dtype.kind == "i" and array.size and array.min() < 0:
        raise ValueError(f"{name}={array.min()} must be >= 0")
    array = array.astype(np.uint64)
    return (array & np.uint64(0xFFFFFFFF)).astype(np.uint32), (array >> np.uint64(32)).astype(np.uint32)


def request_keys(seed: int, prompt_ids, visits, samples) -> np.ndarray:
    """The keys of `B` requests, on the host.

    Args:
        seed: the run's seed.
        prompt_ids, visits, samples: integers `[B]` (or scalars, broadcast), each in [0, 2**64).

    Returns:
        uint32 `[B, 2]`.

    Raises:
        ValueError: an argument is negative or not an integer.
    """
    key = _words("seed", seed)
    for name, values in (("prompt_ids", prompt_ids), ("visits", visits), ("samples", samples)):
        key = threefry2x32(key, _words(name, values))
    return np.stack(key, axis=-1)


def position_keys(request_keys, positions, role: Role):
    """The keys of absolute positions.

    Args:
        request_keys: uint32 `[B, 2]`.
        positions: int32 `[B, N]`, the absolute position (prompt included) of the token the noise is for.
        role: static.

    Returns:
        uint32 `[B, N, 2]`.
    """
    xp = jnp if isinstance(request_keys, jax.Array) or isinstance(positions, jax.Array) else np
    request_keys = xp.asarray(request_keys)
    positions = xp.asarray(positions).astype(np.uint32)
    key = (request_keys[:, None, 0], request_keys[:, None, 1])
    return xp.stack(threefry2x32(key, (positions, xp.full_like(positions, int(role)))), axis=-1)


def bits(keys, vocab: int):
    """Random bits for every vocabulary id: keys uint32 `[..., 2]` -> uint32 `[..., V]`."""
    xp = jnp if isinstance(keys, jax.Array) else np
    return hash_ids(keys[..., 0, None], keys[..., 1, None], xp.arange(vocab, dtype=np.uint32))


def gumbel(keys: jax.Array, vocab: int) -> jax.Array:
    """Standard Gumbel noise: keys uint32 `[..., 2]` -> float32 `[..., V]`, between -2.9 and 22.9."""
    return -jnp.log(exponential_of_bits(bits(jnp.asarray(keys), vocab)))


def uniform(keys: jax.Array) -> jax.Array:
    """One uniform number in [0, 1) a key: uint32 `[..., 2]` -> float32 `[...]`."""
    keys = jnp.asarray(keys)
    word = hash_ids(keys[..., 0], keys[..., 1], np.uint32(0))
    return (word >> np.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)
