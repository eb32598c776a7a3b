"""What the workloads of `bench.rollout` share: the model, a drafter, engines, and sides that can be timed in turn."""

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from adrl_jax.bandit.base import Bandit
from adrl_jax.bandit.fixed import fixed
from adrl_jax.drafter import checkpoint as saved_drafter
from adrl_jax.models import weights
from adrl_jax.models.transformer import engine_layout
from adrl_jax.rollout.engine import Engine, EngineConfig, GenerateResult
from adrl_jax.rollout.stats import LaunchRecord
from adrl_jax.speculation.drafter import Drafter
from adrl_jax.speculation.ngram import Ngram
from adrl_jax.speculation.strategy import Strategy
from adrl_jax.types import Request, SamplingParams

SEED = 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def load(name: str) -> weights.Model:
    """A model by name (`smollm2`) or from a folder or file."""
    return weights.load_named(name) if name in weights.NAMED else weights.load(name)


def drafters(folder: str | None, model: weights.Model, notes: dict[str, str]) -> tuple[dict[str, Drafter], dict[str, Any]]:
    """Drafters by name, and their weights as served: prompt lookup, and what `experiments.drafter_warmup` wrote to `folder`."""
    found: dict[str, Drafter] = {"ngram": Ngram()}
    if folder is None:
        notes["drafter"] = "none given (--drafter): only prompt lookup speculates"
        return found, {}
    found["eagle"], params, _ = saved_drafter.load(folder, model.config)
    return found, {"eagle": engine_layout(params, model.config)}


def make_engine(
    model: weights.Model,
    params: Any,
    strategies: Sequence[Strategy],
    found: dict[str, Drafter],
    drafter_params: dict[str, Any],
    **settings: Any,
) -> Engine:
    """An engine that serves `params` (engine layout) at version 0, with those of the drafters that the strategies name."""
    names = dict(seed=SEED, eos_ids=tuple(model.tokenizer.eos_ids), valid_vocab=model.valid_vocab) | settings
    used = {name: drafter for name, drafter in found.items() if any(s.drafter == name for s in strategies)}
    engine = Engine(model.config, EngineConfig(strategies=tuple(strategies), **names), used)
    engine.publish(params, 0, drafter_params)
    return engine


class Side:
    """Our rollout of some requests under one controller. Calling it runs one and gives tokens per second.

    Attributes:
        state: the controller's, kept from call to call.
        result: of the last call.
        gaps: `host_gap_fraction` of every call.
        launches: of every call.
    """

    def __init__(self, engine: Engine, work: list[Request], sampling: SamplingParams, bandit: Bandit, **how: Any):
        self.engine, self.work, self.sampling, self.bandit, self.how = engine, work, sampling, bandit, how
        self.state = bandit.init()
        self.result: GenerateResult | None = None
        self.gaps: list[float] = []
        self.launches: list[LaunchRecord] = []

    def __call__(self) -> float:
        self.result = self.engine.generate(self.work, self.sampling, self.bandit, self.state, **self.how)
        self.state = self.result.bandit_state
        self.gaps.append(self.result.stats.host_gap_fraction)
        self.launches += self.result.stats.launches
        return self.result.stats.tokens_per_s

    def seconds(self) -> float:
        """Runs one; wall seconds, compilation apart."""
        self()
        return self.result.stats.seconds - self.result.stats.compile_seconds

    def until_compiled(self, most: int = 8, least: int = 1) -> None:
        """Runs until a whole rollout meets no new program, so that what follows compiles little or nothing."""
        for turn in range(most):
            self()
            stats = self.result.stats
            say(
                f"warm-up: {stats.tokens_per_s:.1f} tokens/s, {stats.compile_seconds:.0f} s compiling, {stats.programs} programs"
            )
            if stats.compile_seconds == 0 and turn + 1 >= least:
                break
        self.gaps.clear()
        self.launches.clear()

    @property
    def step_seconds(self) -> float:
        """Median seconds of a round in the last rollout."""
        return statistics.median(x.seconds / x.rounds for x in self.result.stats.launches)

    @property
    def accept_length(self) -> float | None:
        """Of all calls kept; None where nothing speculated."""
        passes = sum(x.accept_passes for x in self.launches)
        return sum(x.accept_tokens for x in self.launches) / passes if passes else None


def fixed_side(engine: Engine, work: list[Request], sampling: SamplingParams, arm: int, **how: Any) -> Side:
    """One arm throughout."""
    return Side(engine, work, sampling, fixed_bandit(engine, arm), **how)


def fixed_bandit(engine: Engine, arm: int) -> Bandit:
    return fixed(arm, len(engine.config.strategies))


def thresholds(strategies: Sequence[Strategy]) -> tuple[int, ...]:
    """BEG's first batch sizes: 1, 2, 4, … one for each distinct number of tokens to verify."""
    return tuple(2**i for i in range(max(1, len({s.verify_tokens for s in strategies if s.speculates}))))
