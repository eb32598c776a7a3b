"""Is the drafter still worth its time? What measured acceptance says, step by step. Pure.

`acceptance` is the share of first drafts that stood: unlike tokens a pass it does not depend on how deep the arms chosen draft.
It is compared with the best it has been; the best fades where training no longer reaches it, since a policy may have become
harder to foresee.
"""

import dataclasses
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class MonitorConfig:
    """Thresholds.

    Attributes:
        fall: the drafter is to be trained when acceptance falls by more than this share of the best it has been; training ends
            when half of the fall is made up.
        smoothing: weight of the newest step in the running mean of acceptance.
        patience: steps of training after which the best is taken to be what there is now.
        min_drafts: steps in which fewer first drafts were looked at say nothing.
        alarm_steps: so many steps in a row with an accept length of 1 (no draft stands) raise the alarm.
        alarm_length: accept lengths up to this count as 1.
    """

    fall: float = 0.1
    smoothing: float = 0.5
    patience: int = 20
    min_drafts: int = 32
    alarm_steps: int = 3
    alarm_length: float = 1.02

    def __post_init__(self):
        for name in ("fall", "smoothing"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"MonitorConfig.{name}={getattr(self, name)!r} must be in (0, 1]")
        for name in ("patience", "min_drafts", "alarm_steps"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"MonitorConfig.{name}={getattr(self, name)!r} must be a positive integer")
        if not self.alarm_length >= 1:
            raise ValueError(f"MonitorConfig.alarm_length={self.alarm_length!r} must be >= 1")


class MonitorState(NamedTuple):
    """What is remembered; plain numbers, so that it goes into a checkpoint's JSON record.

    Attributes:
        current: running mean of acceptance, NaN-free: -1 before the first measurement.
        best: the highest `current` so far, less what fading took; -1 before the first.
        training: whether the drafter is to be trained.
        trained_steps: measured steps since training began.
        stuck: measured steps in a row without an accepted draft.
    """

    current: float = -1.0
    best: float = -1.0
    training: bool = False
    trained_steps: int = 0
    stuck: int = 0


class Measured(NamedTuple):
    """Counts of one rollout, over launches of the learned drafter only.

    Attributes:
        examined, accepted: first drafts that were looked at and that stood.
        passes, tokens: verify passes and what they committed.
    """

    examined: int
    accepted: int
    passes: int
    tokens: int


def measure(launches: Any, strategies: Any, names: Any) -> Measured:
    """The counts of a rollout's launches (`rollout.stats.LaunchRecord`) whose strategy drafts with one of `names`."""
    chosen = [x for x in launches if strategies[x.arm].drafter in names and x.examined]
    return Measured(
        sum(x.examined[0] for x in chosen),
        sum(x.accepted[0] for x in chosen),
        sum(x.accept_passes for x in chosen),
        sum(x.accept_tokens for x in chosen),
    )


def observe(config: MonitorConfig, state: MonitorState, found: Measured) -> tuple[MonitorState, list[str]]:
    """The next state, and what is worth a line in the log: training begins or ends, the alarm.

    A step in which too little was drafted changes nothing.
    """
    if found.examined < config.min_drafts or not found.passes:
        return state, []
    notes = []
    acceptance, length = found.accepted / found.examined, found.tokens / found.passes
    fresh = acceptance if state.current < 0 else state.current + config.smoothing * (acceptance - state.current)
    stuck = state.stuck + 1 if length <= config.alarm_length else 0
    if stuck == config.alarm_steps:
        notes.append(
            f"accept length {length:.2f} for {stuck} steps: no draft is accepted any more. Were the drafter's weights lost, or "
            "were they trained for another policy?"
        )
    best, training, trained = max(state.best, fresh), state.training, state.trained_steps
    if training:
        trained += 1
        if fresh >= best * (1 - config.fall / 2):
            training, trained = False, 0
            notes.append(f"acceptance {fresh:.3f} of {best:.3f}: the drafter has recovered and is left alone")
        elif trained >= config.patience:
            training, trained = False, 0
            notes.append(f"acceptance {fresh:.3f} after {config.patience} steps of training: the best is no longer {best:.3f}")
            best = fresh
    elif fresh < best * (1 - config.fall):
        training, trained = True, 0
        notes.append(f"acceptance fell to {fresh:.3f} from {best:.3f}, by more than {config.fall:.0%}: the drafter is trained")
    return MonitorState(fresh, best, training, trained, stuck), notes
