"""What a bandit over speculative strategies is: three pure functions on a state of arrays, in the manner of Optax.

An *arm* is an index into the run's tuple of strategies. A bandit picks one before each launch and is told afterwards what
the launch did: the tokens it committed, the seconds it took (compiles excluded and results ready), and at each depth how many
drafts were looked at and how many stood. It never looks at a clock itself. A report always carries its own arm and sizes,
so one that arrives late cannot be credited to another.

Letters: `D` the deepest depth among the strategies, at least 1.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np


class Context(NamedTuple):
    """What is known when an arm is chosen.

    Attributes:
        running: int32 `[]`, requests running, >= 1.
        batch: int32 `[]`, rows of the compiled program (batch bucket), >= `running`.
        cache: int32 `[]`, token capacity of a row (cache bucket), >= 1.
        gap: float32 `[A]`, tokens a row that the arm's drafter would have to catch up on first; 0 where it knows all. One
            number stands for all arms.
    """

    running: Any
    batch: Any
    cache: Any
    gap: Any = 0.0


class Report(NamedTuple):
    """One launch, told afterwards.

    Attributes:
        arm: int32 `[]`.
        running: int32 `[]`, requests running when it started.
        batch: int32 `[]`, rows of the compiled program.
        cache: int32 `[]`, token capacity of a row.
        rounds: int32 `[]`, verify passes that ran, >= 1.
        tokens: float32 `[]`, response tokens committed.
        seconds: float32 `[]`, until the results were ready, compilation excluded.
        examined: float32 `[D]`, row-passes in which the draft at depth `i + 1` was looked at: the drafter offered one and all
            earlier drafts of the path stood. Level `i + 1` of a tree. All zero for a plain launch.
        accepted: float32 `[D]`, how many of those stood.
        overhead: float32 `[]`, the part of `seconds` that went before the rounds: a drafter caught up with what was decoded
            without it. The next launch of the same arm will not pay it.
        gap: float32 `[]`, tokens a row that it caught up on.
    """

    arm: Any
    running: Any
    batch: Any
    cache: Any
    rounds: Any
    tokens: Any
    seconds: Any
    examined: Any
    accepted: Any
    overhead: Any = 0.0
    gap: Any = 0.0


class Bandit(NamedTuple):
    """A rule that picks the strategy of the next launch.

    The functions are pure and may be called inside `jax.jit`. Called with concrete numbers they check them first.

    Attributes:
        init: `() -> state`, a NamedTuple of arrays.
        select: `(state, key, context) -> int32 []`, the arm to run. `key` is consumed.
        update: `(state, report) -> state`, credits the report to its own arm.
    """

    init: Callable[[], Any]
    select: Callable[[Any, jax.Array, Context], jax.Array]
    update: Callable[[Any, Report], Any]


class Arm(Protocol):
    """The part of a strategy that bandits read. A depth of 0 means no speculation.

    `drafter` (a name) and `width` (candidates a level; 1 is a chain) are read by `goodput` only.
    """

    depth: int
    verify_tokens: int | None


def tokens_to_verify(strategy: Arm) -> int:
    """Tokens a row sends through the target in one verify pass, the last committed one included."""
    return strategy.depth + 1 if strategy.verify_tokens is None else strategy.verify_tokens


def off_arm(strategies: Sequence[Arm]) -> int:
    """Index of the arm without speculation.

    Raises:
        ValueError: there is none, or more than one.
    """
    off = [i for i, s in enumerate(strategies) if s.depth == 0]
    if len(off) != 1:
        raise ValueError(
            f"strategies must contain exactly one without speculation (depth 0), got {len(off)} of {len(strategies)}"
        )
    return off[0]


def report_depth(strategies: Sequence[Arm]) -> int:
    """`D`, the length of `Report.examined` and `Report.accepted`."""
    return max([1, *(s.depth for s in strategies)])


def check_buckets(batch_buckets: Sequence[int]) -> None:
    """Raises ValueError unless `batch_buckets` ascend from at least 1."""
    sizes = list(batch_buckets)
    if not sizes or sizes[0] < 1 or any(a >= b for a, b in itertools.pairwise(sizes)):
        raise ValueError(f"batch_buckets={tuple(sizes)!r} must ascend from at least 1")


def batch_bucket(batch_buckets: Sequence[int], batch: jax.Array | int) -> jax.Array:
    """Index of the smallest bucket that holds `batch`, int32; of the last one for larger batches."""
    row = jnp.searchsorted(jnp.asarray(batch_buckets, jnp.int32), batch)
    return jnp.minimum(row, len(batch_buckets) - 1).astype(jnp.int32)


def reward(report: Report) -> jax.Array:
    """Tokens per second and request: the batch's size, alike for all arms, is taken out."""
    return report.tokens / (report.seconds * report.running)


def signature(name: str, strategies: Sequence[Arm], **sizes: Any) -> str:
    """What a bandit's state belongs to, as text: the rule, its arms in order, and whatever else fixes the arrays' meaning.

    Kept beside a checkpoint and compared on resume, it tells a state of other arms apart even where the shapes agree.
    """
    arms = ", ".join(getattr(s, "name", None) or f"{s.depth}/{tokens_to_verify(s)}" for s in strategies)
    facts = "".join(f"; {key} {value}" for key, value in sorted(sizes.items()))
    return f"{name}: {arms}{facts}"


def checked(bandit: Bandit, num_arms: int, depth: int | None = None, *, any_arms: bool = False) -> Bandit:
    """`bandit` with its functions jitted, behind checks of every concrete argument.

    Args:
        bandit: the bare functions.
        num_arms: legal arms are 0 to `num_arms - 1`.
        depth: `D`; None takes any.
        any_arms: contexts may tell of any number of arms; the rule does not look at their gaps.

    Raises (from `select` and `update`):
        ValueError: `running < 1`, `batch < running`, `cache < 1`, `arm` outside `[0, num_arms)`, `rounds < 1`, `tokens` not
            finite or negative, `seconds` not finite and positive, `examined` or `accepted` not `[D]`, or `accepted` outside
            `[0, examined]`, `overhead` outside `[0, seconds)`, `gap` negative, not finite, or neither a number nor `[A]`.
    """
    select, update = jax.jit(bandit.select), jax.jit(bandit.update)

    def checked_select(state, key, context):
        _require_sizes(context)
        gap = 0.0 if any_arms and np.ndim(context.gap) == 1 else context.gap
        _require_gap(gap, num_arms)
        if not isinstance(gap, jax.core.Tracer):
            gap = np.broadcast_to(np.asarray(gap, np.float32), (num_arms,))
        return select(state, key, Context(*(_scalar(x, np.int32) for x in context[:3]), gap))

    def checked_update(state, report):
        _require(report.arm, lambda x: 0 <= x < num_arms, "arm", f"must be in [0, {num_arms})")
        _require_sizes(report)
        _require(report.rounds, lambda x: x >= 1, "rounds", "must be at least 1 verify pass")
        _require(report.tokens, lambda x: 0 <= x < np.inf, "tokens", "must be finite and >= 0")
        _require(report.seconds, lambda x: 0 < x < np.inf, "seconds", "must be finite and > 0")
        if not isinstance(report.seconds, jax.core.Tracer):
            most = float(report.seconds)
            _require(report.overhead, lambda x: 0 <= x < most, "overhead", f"must be in [0, seconds={most})")
        _require(report.gap, lambda x: 0 <= x < np.inf, "gap", "must be finite and >= 0")
        _require_counts(report, depth)
        return update(state, Report(*(_scalar(x, dtype) for x, dtype in zip(report, _REPORT_TYPES))))

    return Bandit(bandit.init, checked_select, checked_update)


_REPORT_TYPES = (np.int32,) * 5 + (np.float32,) * 6


def _scalar(value, dtype):
    """Numbers stay numpy's: a conversion on the device takes as long as the choice itself."""
    return jnp.asarray(value, dtype) if isinstance(value, jax.Array) else np.asarray(value, dtype)


def _require(value, legal: Callable[[float], bool], name: str, rule: str) -> None:
    if isinstance(value, jax.core.Tracer):
        return  # the caller jits and vouches for the value
    if not legal(float(value)):
        raise ValueError(f"{name}={value!r} {rule}")


def _require_sizes(sizes: Context | Report) -> None:
    _require(sizes.running, lambda x: x >= 1, "running", "must be at least 1 request")
    if not isinstance(sizes.running, jax.core.Tracer):
        least = float(sizes.running)
        _require(sizes.batch, lambda x: x >= least, "batch", f"must be at least running={sizes.running!r}")
    _require(sizes.cache, lambda x: x >= 1, "cache", "must be at least 1 token")


def _require_gap(gap, num_arms: int) -> None:
    if isinstance(gap, jax.core.Tracer):
        return
    value = np.asarray(gap, np.float64)
    if value.shape not in ((), (num_arms,)) or not ((0 <= value) & (value < np.inf)).all():
        raise ValueError(f"gap={value.tolist()} must be one number or {num_arms}, finite and >= 0")


def _require_counts(report: Report, depth: int | None) -> None:
    examined, accepted = report.examined, report.accepted
    shape = np.shape(examined)
    if len(shape) != 1 or np.shape(accepted) != shape or depth not in (None, shape[0]):
        want = "[D]" if depth is None else f"[{depth}]"
        raise ValueError(f"examined{list(shape)} and accepted{list(np.shape(accepted))} must both be {want}, one entry a depth")
    if isinstance(examined, jax.core.Tracer) or isinstance(accepted, jax.core.Tracer):
        return
    looked, stood = np.asarray(examined), np.asarray(accepted)
    if not ((0 <= stood) & (stood <= looked) & (looked < np.inf)).all():
        raise ValueError(f"accepted={stood.tolist()} must lie between 0 and examined={looked.tolist()}, which must be finite")
