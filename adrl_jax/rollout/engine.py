"""Generating responses with one published policy, any number of drafters and a controller that chooses among them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from adrl_jax.bandit.base import Bandit
from adrl_jax.models.families import ModelConfig
from adrl_jax.rollout import admission, refresh, target
from adrl_jax.rollout.programs import Programs
from adrl_jax.rollout.round import drafter_or_none
from adrl_jax.rollout.served import Flow, GenerateResult, Served
from adrl_jax.rollout.serving import Serving
from adrl_jax.rollout.settings import EngineConfig
from adrl_jax.rollout.stats import LaunchRecord
from adrl_jax.rollout.tree_round import check_tree
from adrl_jax.speculation.drafter import Drafter
from adrl_jax.speculation.history_store import HistoryStore
from adrl_jax.types import Request, Rollout, SamplingParams

__all__ = ["Engine", "EngineConfig", "Flow", "GenerateResult"]


class Engine:
    """Holds compiled programs and the published weights, nothing else: no cache outlives a call of `generate`.

    Attributes:
        programs: what has been compiled so far.
        collect: called by `generate` with each response that has ended and its hidden states `[n - 1, C]` (numpy, to be copied),
            where a drafter reads any; None hands nothing out.
        version, drafter_version: of what is published, -1 before the first `publish`.
    """

    def __init__(self, model_config: ModelConfig, config: EngineConfig, drafters: Mapping[str, Drafter] | None = None):
        """
        Args:
            drafters: by name; every strategy's drafter must be there.

        Raises:
            ValueError: a strategy names an unknown drafter, or a tree of one that drafts chains; ids or lengths exceed the model's;
                the kernels cannot serve the model or do not run here.
        """
        self.config, self.drafters = config, dict(drafters or {})
        taps = sorted({n for d in self.drafters.values() for n in getattr(d, "taps", ())})
        self.model_config = dataclasses.replace(model_config, taps=tuple(taps))
        for strategy in config.strategies:
            drafter = drafter_or_none(strategy, self.drafters)
            if strategy.width > 1:
                check_tree(strategy, drafter)
        vocab, limit = model_config.vocab_size, model_config.max_positions
        if config.valid_vocab is not None and not 1 <= config.valid_vocab <= vocab:
            raise ValueError(f"EngineConfig.valid_vocab={config.valid_vocab} must be in [1, {vocab}], the model's vocab_size")
        past = [e for e in config.eos_ids if e >= vocab]
        if past:
            raise ValueError(f"EngineConfig.eos_ids contains {past[0]}, which is not below the model's vocab_size={vocab}")
        if config.max_length is not None and config.max_length > limit:
            raise ValueError(f"EngineConfig.max_length={config.max_length} exceeds the model's max_positions={limit}")
        kernels = target.resolve(config.kernels, model_config, config.strategies, config.max_batch)
        self.config = dataclasses.replace(config, kernels=kernels)
        self.drafters = {name: target.with_kernels(drafter, kernels) for name, drafter in self.drafters.items()}
        self.programs = Programs()
        self.drafter_version = -1
        self.collect: Callable[[Rollout, np.ndarray], None] | None = None
        self._served: Served | None = None

    @property
    def version(self) -> int:
        return -1 if self._served is None else self._served.version

    @property
    def served(self) -> Served | None:
        """The snapshot that calls of `generate` begin with, None before the first `publish`."""
        return self._served

    @property
    def params(self) -> Any:
        """What is published, None before the first `publish`."""
        return None if self._served is None else self._served.params

    def publish(
        self, params: Any, version: int, drafter_params: Mapping[str, Any] | None = None, drafter_version: int = 0
    ) -> None:
        """Serves `params` from the next call of `generate` on.

        Args:
            params, drafter_params: any layout that the model reads; `transformer.engine_layout` is the fast one.

        Raises:
            ValueError: the version is negative; a drafter with parameters lacks them.
        """
        if version < 0:
            raise ValueError(f"version={version} must be >= 0")
        given = dict(drafter_params or {})
        for name, drafter in self.drafters.items():
            if name not in given and hasattr(drafter, "learned"):
                given[name] = given.get(drafter.learned.name)  # a merged drafter's are those of its learned half
            if given.get(name) is None and jax.eval_shape(drafter.init_params, jax.random.key(0)) is not None:
                raise ValueError(f"drafter {name!r} needs parameters: publish(drafter_params={{{name!r}: …}})")
        own = {name: _served(drafter, given.get(name), params) for name, drafter in self.drafters.items()}
        self._served = Served(self.model_config, params, int(version), self.drafters, own)
        self.drafter_version = int(drafter_version)

    def publish_drafter(self, drafter_params: Mapping[str, Any], drafter_version: int) -> None:
        """Serves other drafter weights with the policy that is published already.

        Raises:
            ValueError: nothing is published yet; a drafter with parameters lacks them.
        """
        if self._served is None:
            raise ValueError("the engine has no weights yet: call publish first")
        self.publish(self._served.params, self._served.version, drafter_params, drafter_version)

    def reseed(self, seed: int) -> None:
        """Names other noise from the next call of `generate` on. No program knows the seed, so nothing is compiled anew."""
        self.config = dataclasses.replace(self.config, seed=seed)

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        bandit: Bandit,
        bandit_state: Any,
        *,
        replay_arms: Sequence[int] | None = None,
        on_launch: Callable[[LaunchRecord], None] | None = None,
        expected_tokens: Sequence[float] | None = None,
        history: HistoryStore | None = None,
        flow: Flow | None = None,
    ) -> GenerateResult:
        """Finishes all requests with what is published now.

        Under `coupled` verification the tokens depend on the weights, the requests and the seed only: not on the arms
        chosen, the batch, the order of requests, or any size in `EngineConfig`.

        Args:
            bandit: picks the arm (an index into `config.strategies`) of each launch and learns from its tokens per second.
            replay_arms: use these arms, in order, instead of asking the bandit (which then learns nothing).
            on_launch: called with each record as it is made.
            expected_tokens: response tokens expected of each request, for `admission="longest_first"`; None means its budget.
            history: earlier responses to the same prompts, for drafters that look things up in them; what this call finishes
                is added to it.
            flow: requests come, responses leave and weights are swapped while the call goes on.

        Raises:
            ValueError: before anything is compiled: a request does not fit, or nothing was published. Later: the replayed
                trace is too short or names an arm that is not there.
        """
        return self.serving(
            requests,
            sampling,
            bandit,
            bandit_state,
            replay_arms=replay_arms,
            on_launch=on_launch,
            expected_tokens=expected_tokens,
            history=history,
            flow=flow,
        ).run()

    def serving(
        self, requests: Sequence[Request], sampling: SamplingParams, bandit: Bandit, bandit_state: Any, **more: Any
    ) -> Serving:
        """A call of `generate` that has not begun: `run` does the work, `bandit_state` tells how far the bandit is."""
        if self._served is None:
            raise ValueError("the engine has no weights yet: call publish first")
        if requests or more.get("flow") is None or more["flow"].feed is None:
            self.check(requests)
        replay = more.pop("replay_arms", None)
        order = [more.pop(name, None) for name in ("on_launch", "expected_tokens", "history", "flow")]
        if more:
            raise TypeError(f"unknown arguments: {', '.join(more)}")
        common = (self._served, self.config, self.programs, requests, sampling, bandit, bandit_state)
        serving = Serving(*common, replay, *order, published=lambda: self._served)
        serving.collect = self.collect
        return serving

    def check(self, requests: Sequence[Request]) -> None:
        """Raises ValueError for a request that cannot be served, before anything is compiled."""
        limit = self.model_config.max_positions if self.config.max_length is None else self.config.max_length
        admission.check(requests, self.model_config.vocab_size, limit)
        refresh.check_drafts(requests, self.config.verification)


def _served(drafter: Drafter, drafter_params: Any, params: Any) -> Any:
    """A drafter's parameters with what it takes from the target that is served, where it takes anything."""
    return drafter.serve(drafter_params, params) if hasattr(drafter, "serve") else drafter_params
