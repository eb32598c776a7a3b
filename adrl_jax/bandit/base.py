"""What a bandit over speculative strategies is: three pure functions on a state of arrays, in the manner of Optax.

An *arm* is an index into the run's tuple of strategies. After each launch the engine reports the arm that ran, how many
requests were running, the tokens committed and the seconds it took, compiles excluded and results ready; the bandit never
looks at a clock itself. A report always carries its own arm, so one that arrives late cannot be credited to another.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Bandit(NamedTuple):
    """A rule that picks the strategy of the next launch.

    The functions are pure and may be called inside `jax.jit`. Called with concrete numbers they check them first.

    Attributes:
        init: `() -> state`, a NamedTuple of arrays.
        select: `(state, key, running) -> int32 []`, the arm to run with `running >= 1` requests. `key` is consumed.
        update: `(state, arm, running, tokens, seconds) -> state`, credits `tokens / seconds` to `arm` at `running`.
    """

    init: Callable[[], Any]
    select: Callable[[Any, jax.Array, Any], jax.Array]
    update: Callable[[Any, Any, Any, Any, Any], Any]


def checked(bandit: Bandit, num_arms: int) -> Bandit:
    """`bandit` with its functions jitted, behind checks of every concrete argument.

    Raises (from `select` and `update`):
        ValueError: `running < 1`, `arm` outside `[0, num_arms)`, `tokens < 0`, or `seconds` not finite and positive.
    """
    select, update = jax.jit(bandit.select), jax.jit(bandit.update)

    def checked_select(state, key, running):
        _require(running, lambda x: x >= 1, "running", "must be at least 1 request")
        return select(state, key, _scalar(running, np.int32))

    def checked_update(state, arm, running, tokens, seconds):
        _require(arm, lambda x: 0 <= x < num_arms, "arm", f"must be in [0, {num_arms})")
        _require(running, lambda x: x >= 1, "running", "must be at least 1 request")
        _require(tokens, lambda x: 0 <= x < np.inf, "tokens", "must be finite and >= 0")
        _require(seconds, lambda x: 0 < x < np.inf, "seconds", "must be finite and > 0")
        return update(
            state,
            _scalar(arm, np.int32),
            _scalar(running, np.int32),
            _scalar(tokens, np.float32),
            _scalar(seconds, np.float32),
        )

    return Bandit(bandit.init, checked_select, checked_update)


def _scalar(value, dtype):
    """Numbers stay numpy's: a conversion on the device takes as long as the choice itself."""
    return jnp.asarray(value, dtype) if isinstance(value, jax.Array) else dtype(value)


def _require(value, legal: Callable[[float], bool], name: str, rule: str) -> None:
    if isinstance(value, jax.core.Tracer):
        return  # the caller jits and vouches for the value
    if not legal(float(value)):
        raise ValueError(f"{name}={value!r} {rule}")
