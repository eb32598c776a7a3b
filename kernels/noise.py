"""The part of counter-based noise that runs inside kernels: (key, vocabulary id) -> 32 random bits -> Gumbel noise.

`adrl_jax.sampling.noise` names the keys and imports these functions, so there is one definition of the bits for every backend.
Everything is made of 32-bit integer and float32 operations that NumPy, XLA and Mosaic all have.
"""

import jax
import jax.numpy as jnp
import numpy as np


def hash_ids(key0, key1, ids):
    """32 random bits for vocabulary ids: uint32 arrays in, uint32 out, broadcast.

    Two keyed rounds of multiplications and shifts (constants from Wellons' exhaustive searches, `lowbias32` and `triple32`).
    For one key it is a bijection of `ids`. The second key word has to wait for the first full round: added earlier, while the
    counter is still an almost linear sequence, it would make some pairs of positions shifted copies of each other.
    """
    x = ids ^ key0
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    x = (x ^ (x >> np.uint32(16))) + key1
    x = (x ^ (x >> np.uint32(17))) * np.uint32(0xAC4C1B51)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x31848BAB)
    return x ^ (x >> np.uint32(14))


def exponential_of_bits(random_bits: jax.Array) -> jax.Array:
    """Exponential(1) variates, float32, of uint32 bits; `-log` of them is Gumbel noise.

    The tail probability u = (bits + 1/2) / 2**32 is small where the variate is small, which is where a Gumbel maximum is
    decided, and `log1p` keeps its full precision there. Rounding to 1 is prevented, so the result is finite.
    """
    return _exponential(random_bits.astype(jnp.float32))


def _exponential(counts: jax.Array) -> jax.Array:
    u = counts * jnp.float32(2.0**-32) + jnp.float32(2.0**-33)
    return -jnp.log1p(-jnp.minimum(u, jnp.float32(1.0 - 2.0**-24)))


def gumbel_in_kernel(random_bits: jax.Array) -> jax.Array:
    """Standard Gumbel noise, float32, of uint32 bits; the conversion to float goes by halves, which Mosaic can do.

    Both halves are exact in float32 and their sum is rounded once, as the direct conversion rounds.
    """
    high = (random_bits >> np.uint32(16)).astype(jnp.int32).astype(jnp.float32)
    low = (random_bits & np.uint32(0xFFFF)).astype(jnp.int32).astype(jnp.float32)
    return -jnp.log(_exponential(high * jnp.float32(65536.0) + low))
