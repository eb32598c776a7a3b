"""Correct stale batches by importance weights, or make them current: decided for a whole batch, before anyone looks at it.

A rollout's own disagreement, length or reward must not decide: correcting where drafts agree and refreshing where they differ
counts the agreeing ones twice (`tests/rollout/test_refresh.py` has the smallest example, 1.583 for a true 1.400). So the
choice knows the batch's lag and what *earlier* batches were like, and nothing else.
"""

import dataclasses
from typing import NamedTuple

CHOICES = ("off", "always", "auto")
_KEEP = 0.8  # weight of what was known before another batch


@dataclasses.dataclass(frozen=True)
class RefreshConfig:
    """When batches are made current.

    Attributes:
        choice: `off`; `always`, of batches old enough; or `auto`.
        lag: youngest age, in versions, at which a batch may be refreshed, >= 1.
        above: `auto` refreshes where the disagreement to be expected at the batch's lag is at least this share of tokens, and
            corrects below it.
        cost: `auto` corrects where refreshing took more than this many times the seconds of generating a batch.
    """

    choice: str = "off"
    lag: int = 1
    above: float = 0.05
    cost: float = 1.0

    def __post_init__(self):
        if self.choice not in CHOICES:
            raise ValueError(f"choice={self.choice!r} is unknown; choose one of {', '.join(CHOICES)}")
        if self.lag < 1:
            raise ValueError(f"lag={self.lag!r} must be >= 1: a batch of the newest policy is current")


class Known(NamedTuple):
    """What earlier batches were like: running means, None before the first.

    Attributes:
        disagreement: share of tokens that the policy of the time would not draw, per version of lag.
        refresh_s, generate_s: seconds of making a batch current, and of generating one.
    """

    disagreement: float | None = None
    refresh_s: float | None = None
    generate_s: float | None = None

    def learn(self, **values: float) -> "Known":
        """One more observation of some of the fields."""
        old = self._asdict()
        mixed = {k: v if old[k] is None else _KEEP * old[k] + (1 - _KEEP) * v for k, v in values.items()}
        return self._replace(**mixed)


def decide(config: RefreshConfig, known: Known, lag: int) -> bool:
    """Whether a batch whose weights are `lag` versions old is made current. Nothing of the batch itself is asked for."""
    if config.choice == "off" or lag < config.lag:
        return False
    if config.choice == "always":
        return True
    if known.disagreement is None or known.disagreement * lag < config.above:
        return False
    costs = known.refresh_s, known.generate_s
    return None in costs or costs[0] <= config.cost * costs[1]
