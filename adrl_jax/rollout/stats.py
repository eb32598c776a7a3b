"""What happened in a rollout, launch by launch."""

import dataclasses

import numpy as np

from adrl_jax.bandit.base import Report


@dataclasses.dataclass(frozen=True)
class LaunchRecord:
    """One launch.

    Attributes:
        arm: index into the engine's strategies.
        running: requests running when it started.
        batch_bucket, cache_bucket: rows and token capacity of the compiled program.
        rounds: verify passes that ran.
        tokens: response tokens committed.
        seconds: from dispatch until results were on the host, the drafter's catching up included, compilation excluded.
        start: seconds since the rollout began.
        compiled: a program was compiled for this launch, its own or its drafter's (its time is noisier and not told to the bandit).
        accept_passes, accept_tokens: summed over rows: speculative passes of running rows and what they committed.
        examined, accepted: by depth, drafts that were looked at and those that stood (`Tally`); empty for plain launches.
        faults: row-passes in which the drafter gave something that is not a number.
        catch_up_seconds: the part of `seconds` in which the drafter caught up.
        catch_up_tokens: how many tokens it caught up on, in the row that lacked most.
    """

    arm: int
    running: int
    batch_bucket: int
    cache_bucket: int
    rounds: int
    tokens: int
    seconds: float
    start: float
    compiled: bool
    accept_passes: int
    accept_tokens: int
    examined: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    faults: int = 0
    catch_up_seconds: float = 0.0
    catch_up_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Event:
    """A stretch of time in which the device worked for the rollout; what lies between events is the host's.

    Attributes:
        kind: `prefill`, `admit`, `reshape`, `references`, `catch_up`, `plain` or `speculate`.
        start, seconds: since the rollout began, and how long; compilation excluded.
        facts: what was done, for display.
    """

    kind: str
    start: float
    seconds: float
    facts: dict[str, int | str]


@dataclasses.dataclass(frozen=True)
class RolloutStats:
    """One call of `Engine.generate`.

    Attributes:
        launches: in order.
        seconds: wall clock of the whole call.
        compile_seconds: part of it that went into compiling.
        prefill_seconds: part of it that went into prompts.
        device_seconds: part of it during which a launch, prefill, catch-up or compaction was on the device.
        programs: compiled programs the engine holds at the end.
        events: what the device did when, in order.
        drafts: of earlier responses to be verified (`refresh`): tokens, tokens kept, tokens that the policy would not draw.
    """

    launches: tuple[LaunchRecord, ...]
    seconds: float
    compile_seconds: float
    prefill_seconds: float
    device_seconds: float
    programs: int
    events: tuple[Event, ...] = ()
    drafts: tuple[int, int, int] = (0, 0, 0)

    def then(self, later: "RolloutStats") -> "RolloutStats":
        """Both calls as one."""
        seconds = ("seconds", "compile_seconds", "prefill_seconds", "device_seconds")
        return RolloutStats(
            (*self.launches, *later.launches),
            **{name: getattr(self, name) + getattr(later, name) for name in seconds},
            programs=later.programs,
            events=(*self.events, *later.events),
        )

    @property
    def faults(self) -> int:
        """Row-passes in which a drafter gave something that is not a number; they fell back to the target's own token."""
        return sum(x.faults for x in self.launches)

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return sum(x.tokens for x in self.launches)

    @property
    def tokens_per_s(self) -> float:
        """Response tokens per second of wall clock, prefill included and compilation excluded."""
        return self.tokens / max(self.seconds - self.compile_seconds, 1e-9)

    @property
    def host_gap_fraction(self) -> float:
        """Share of the wall clock (compilation excluded) in which the device had nothing to do."""
        total = max(self.seconds - self.compile_seconds, 1e-9)
        return max(0.0, 1.0 - self.device_seconds / total)

    @property
    def accept_passes(self) -> int:
        return sum(x.accept_passes for x in self.launches)

    @property
    def accept_length(self) -> float:
        """Tokens committed per row and speculative verify pass, the target's own included; NaN where nothing speculated."""
        return sum(x.accept_tokens for x in self.launches) / self.accept_passes if self.accept_passes else float("nan")

    @property
    def arm_trace(self) -> tuple[int, ...]:
        """The arm of every launch; `Engine.generate(replay_arms=…)` repeats it."""
        return tuple(x.arm for x in self.launches)

    @property
    def running_over_time(self) -> tuple[tuple[float, int], ...]:
        """(seconds since the start, requests running) at each launch: the long tail."""
        return tuple((x.start, x.running) for x in self.launches)


def report_of(record: LaunchRecord, deepest: int) -> Report:
    """What a bandit is told of a launch; counts are padded to the `deepest` strategy's depth."""

    def padded(counts):
        return np.pad(np.asarray(counts, np.float32), (0, deepest - len(counts)))

    return Report(
        record.arm,
        record.running,
        record.batch_bucket,
        record.cache_bucket,
        record.rounds,
        record.tokens,
        record.seconds,
        padded(record.examined),
        padded(record.accepted),
        record.catch_up_seconds,
        record.catch_up_tokens,
    )
