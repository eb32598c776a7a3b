"""The closing comparison: one rollout batch with and without speculation, same weights, same noise, same machine.

Both sides run once to compile, then in turn. Seconds are wall clock from the first request to the last response with
compilation taken out; the speed-up is the ratio of their medians. Token ids of all repeats are compared; a first divergence
at a float tie, confirmed in float64, is counted apart (`rollout.ties`).
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from adrl_jax.bandit.fixed import fixed
from adrl_jax.metrics import CompileClock
from adrl_jax.rollout import ties
from adrl_jax.rollout.ties import Agreement
from adrl_jax.runtime.parts import Parts
from adrl_jax.types import Request, Rollout, SamplingParams


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was measured.

    Attributes:
        seconds_on, seconds_off: of each repeat, with speculation (the run's bandit) and without.
        tokens: response tokens of the batch.
        accept_length: over all repeats with speculation; None where nothing speculated.
        divergences: responses whose ids or end differ from the first run's for another reason than a tie, in the worst of
            all runs; None under `rejection`, which keeps the law and not the tokens.
        ties: responses that differ by confirmed ties, likewise.
        running: per launch of the last repeat with speculation: seconds since the start, requests still running.
        running_off: the same without.
    """

    seconds_on: tuple[float, ...]
    seconds_off: tuple[float, ...]
    tokens: int
    accept_length: float | None
    divergences: int | None
    ties: int
    running: tuple[tuple[float, int], ...]
    running_off: tuple[tuple[float, int], ...]

    @property
    def speedup(self) -> float:
        return statistics.median(self.seconds_off) / statistics.median(self.seconds_on)

    @property
    def identical(self) -> bool | None:
        return None if self.divergences is None else self.divergences == 0

    def details(self) -> dict[str, Any]:
        """Further fields of summary.json."""
        on, off = statistics.median(self.seconds_on), statistics.median(self.seconds_off)
        return {
            "rollout_tokens": self.tokens,
            "rollout_tokens_per_s": self.tokens / on,
            "rollout_tokens_per_s_off": self.tokens / off,
            "rollout_seconds": list(self.seconds_on),
            "rollout_seconds_off": list(self.seconds_off),
            "divergent_responses": self.divergences,
            "tie_divergences": self.ties,
            "running": [list(point) for point in self.running],
            "running_off": [list(point) for point in self.running_off],
        }


def speculation(
    parts: Parts,
    params: Any,
    requests: Sequence[Request],
    sampling: SamplingParams,
    bandit_state: Any,
    clock: CompileClock,
    *,
    repeats: int,
    on_run: Callable[[], None] = lambda: None,
    on_launch: Callable[[Any], None] | None = None,
) -> Comparison:
    """Generates `requests` `2 * (repeats + 1)` times with what the engine has published.

    Args:
        params: what it has published.
        bandit_state: where the run's bandit stands; it goes on learning within the comparison.
        repeats: timed ones on each side, >= 1.
        on_run: called after each generation.
        on_launch: handed to the engine.
    """
    coupled = parts.engine.config.verification == "coupled"
    off = fixed(parts.off, len(parts.strategies))
    sides = {"on": (parts.bandit, bandit_state), "off": (off, off.init())}
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    first: list[Rollout] | None = None
    running: dict[str, tuple[tuple[float, int], ...]] = {}
    passes = tokens = 0
    agreements: list[Agreement] = []
    for turn in range(repeats + 1):
        for side in ("on", "off") if turn % 2 == 0 else ("off", "on"):
            bandit, state = sides[side]
            compiled, start = clock.seconds, time.perf_counter()
            result = parts.engine.generate(requests, sampling, bandit, state, on_launch=on_launch)
            spent = time.perf_counter() - start - (clock.seconds - compiled)
            sides[side] = (bandit, result.bandit_state)
            first = result.rollouts if first is None else first
            if coupled:
                agreements.append(agreement(parts, params, first, result.rollouts))
            running[side] = running_over_time(result.stats.launches)
            if side == "on":
                passes += sum(r.accept_passes for r in result.rollouts)
                tokens += sum(r.accept_tokens for r in result.rollouts)
            if turn:
                seconds[side].append(spent)
            on_run()
    return Comparison(
        tuple(seconds["on"]),
        tuple(seconds["off"]),
        sum(r.response_length for r in first),
        tokens / passes if passes else None,
        max(sum(not d.tie for d in a.divergences) for a in agreements) if coupled else None,
        max(a.tie_divergences for a in agreements) if coupled else 0,
        running["on"],
        running["off"],
    )


def agreement(parts: Parts, params: Any, a: Sequence[Rollout], b: Sequence[Rollout]) -> Agreement:
    """Where two runs of the same requests part, ties told apart."""
    config = parts.engine.config
    return ties.compare(parts.model_config, params, a, b, seed=config.seed, valid_vocab=config.valid_vocab)


def running_over_time(launches: Sequence[Any]) -> tuple[tuple[float, int], ...]:
    """(seconds since the first launch, requests running in it) at each launch, and 0 requests at the end."""
    if not launches:
        return ()
    origin = launches[0].start
    points = [(x.start - origin, x.running) for x in launches]
    return (*points, (launches[-1].start + launches[-1].seconds - origin, 0))
