"""The host side of a rollout: it decides what to launch next, the device does the rest.

Requests are served in waves of at most `max_batch` rows. Each distinct prompt of a wave is prefilled once and its cache given
to all its rows. Then launches of several rounds follow each other; before each, the controller picks a strategy for the
number of rows still running, rows that have finished make room (the batch shrinks to a smaller compiled size) and the cache
grows when a launch could reach its end. The host waits for the device once a launch.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.bandit.base import Bandit
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import check_capacity
from adrl_jax.rollout import round as rounds
from adrl_jax.rollout.programs import Programs
from adrl_jax.rollout.state import RolloutState, Rows, bucket, expand, reshape
from adrl_jax.rollout.stats import LaunchRecord, RolloutStats
from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law
from adrl_jax.speculation import verify
from adrl_jax.speculation.drafter import Drafter
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import FinishReason, Request, Rollout, SamplingParams


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How rollouts are run.

    Attributes:
        seed: the run's seed; with prompt, visit, sample and position it names all noise.
        eos_ids: tokens that end a response.
        valid_vocab: ids at or past it are never drawn; None allows the whole table.
        strategies: the arms. Must contain `OFF`.
        max_batch: rows that run together.
        batch_buckets: compiled batch sizes; None means powers of two up to `max_batch`, and `max_batch`.
        cache_bucket: cache capacities are multiples of this (of coarser units when long), in tokens.
        rounds_per_launch: verify passes between two looks of the host.
        verification: `coupled` or `rejection`.
        prefill_bucket: prompts are padded to multiples of this, in tokens.
        prefill_batch: most prompts prefilled together.
    """

    seed: int
    eos_ids: tuple[int, ...]
    valid_vocab: int | None = None
    strategies: tuple[Strategy, ...] = (OFF,)
    max_batch: int = 64
    batch_buckets: tuple[int, ...] | None = None
    cache_bucket: int = 64
    rounds_per_launch: int = 16
    verification: str = "coupled"
    prefill_bucket: int = 32
    prefill_batch: int = 8

    def __post_init__(self):
        for name in ("max_batch", "cache_bucket", "rounds_per_launch", "prefill_bucket", "prefill_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"EngineConfig.{name}={value!r} must be a positive integer")
        verify.check_method(self.verification)
        if OFF not in self.strategies:
            raise ValueError("EngineConfig.strategies must contain OFF: plain decoding is always a choice")
        if len(set(self.strategies)) != len(self.strategies):
            raise ValueError(f"EngineConfig.strategies has duplicates: {', '.join(s.name for s in self.strategies)}")
        trees = [s.name for s in self.strategies if s.width != 1]
        if trees:
            raise ValueError(f"EngineConfig.strategies={trees[0]!r} drafts a tree; this engine verifies chains (width 1)")
        if self.batch_buckets is not None and (not self.batch_buckets or max(self.batch_buckets) < self.max_batch):
            raise ValueError(f"EngineConfig.batch_buckets={self.batch_buckets!r} must reach max_batch={self.max_batch}")
        if any(not isinstance(e, int) or e < 0 for e in self.eos_ids):
            raise ValueError(f"EngineConfig.eos_ids={self.eos_ids!r} must be token ids >= 0")

    @property
    def batches(self) -> tuple[int, ...]:
        """Compiled batch sizes, ascending."""
        if self.batch_buckets is not None:
            return tuple(sorted(set(self.batch_buckets)))
        powers = [1 << i for i in range(self.max_batch.bit_length()) if 1 << i < self.max_batch]
        return (*powers, self.max_batch)

    def capacity(self, needed: int) -> int:
        """The cache capacity that holds `needed` tokens: multiples of `cache_bucket`, eight steps to each doubling."""
        unit = self.cache_bucket
        while needed > 8 * unit:
            unit *= 2
        return -(-needed // unit) * unit


@dataclasses.dataclass(frozen=True)
class GenerateResult:
    """What `Engine.generate` returns; `rollouts` are in the order of the requests."""

    rollouts: list[Rollout]
    bandit_state: Any
    stats: RolloutStats


@dataclasses.dataclass
class _Clock:
    """Host bookkeeping of one call of `generate`."""

    begin: float
    device: float = 0.0
    prefill: float = 0.0


class Engine:
    """Generates responses with one published policy and any number of drafters.

    `publish` before `generate`. The engine holds compiled programs and the published weights, nothing else.
    """

    def __init__(self, model_config: ModelConfig, config: EngineConfig, drafters: Mapping[str, Drafter] | None = None):
        self.model_config, self.config = model_config, config
        self.drafters = dict(drafters or {})
        for strategy in config.strategies:
            rounds.drafter_or_none(strategy, self.drafters)
        vocab = model_config.vocab_size
        if config.valid_vocab is not None and config.valid_vocab > vocab:
            raise ValueError(f"EngineConfig.valid_vocab={config.valid_vocab} exceeds the model's vocab_size={vocab}")
        past = [e for e in config.eos_ids if e >= vocab]
        if past:
            raise ValueError(f"EngineConfig.eos_ids contains {past[0]}, past the model's vocab_size={vocab}")
        self.programs = Programs()
        self.version = -1
        self.drafter_version = -1
        self._params: Any = None
        self._drafter_params: dict[str, Any] = {}

    @property
    def keeps_hidden(self) -> bool:
        return any(d.uses_hidden for d in self.drafters.values())

    def publish(
        self, params: Any, version: int, drafter_params: Mapping[str, Any] | None = None, drafter_version: int = 0
    ) -> None:
        """Serves `params` (engine layout, see `transformer.engine_layout`) from now on. Nothing cached outlives a version.

        Raises:
            ValueError: `params` has no `head`, so is not in engine layout; a drafter with parameters lacks them.
        """
        if "head" not in params:
            raise ValueError("params have no `head`: publish them in engine layout (transformer.engine_layout)")
        drafter_params = dict(drafter_params or {})
        for name, drafter in self.drafters.items():
            if drafter_params.get(name) is None and jax.eval_shape(drafter.init_params, jax.random.key(0)) is not None:
                raise ValueError(f"drafter {name!r} needs parameters; publish(drafter_params={{{name!r}: …}})")
            drafter_params.setdefault(name, None)
        self._params, self.version = params, int(version)
        self._drafter_params, self.drafter_version = drafter_params, int(drafter_version)

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        bandit: Bandit,
        bandit_state: Any,
        *,
        replay_arms: Sequence[int] | None = None,
        on_launch: Callable[[LaunchRecord], None] | None = None,
    ) -> GenerateResult:
        """Finishes all requests.

        Args:
            bandit: picks the arm (an index into `config.strategies`) of each launch and learns from its tokens per second.
            replay_arms: use these arms, in order, instead of asking the bandit (which then learns nothing).
            on_launch: called with each record as it is made.

        Raises:
            ValueError: a request does not fit the model, before anything is compiled; `publish` was not called; the replayed
                trace is too short or names an arm that is not there.
            RuntimeError: a row stopped making progress (an internal error).
        """
        self._check(requests)
        serve = _Serving(self, requests, sampling, bandit, bandit_state, replay_arms, on_launch)
        return serve.run()

    def _check(self, requests: Sequence[Request]) -> None:
        if self._params is None:
            raise ValueError("the engine has no weights yet: call publish first")
        if not requests:
            raise ValueError("requests is empty; generate needs at least one")
        limit = self.model_config.max_positions
        for r in requests:
            if r.max_new_tokens < 1:
                raise ValueError(f"max_new_tokens={r.max_new_tokens} of prompt {r.prompt.prompt_id} must be >= 1")
            needed = len(r.prompt.token_ids) + r.max_new_tokens
            if needed > limit:
                raise ValueError(
                    f"prompt {r.prompt.prompt_id} has {len(r.prompt.token_ids)} tokens and max_new_tokens={r.max_new_tokens}: "
                    f"{needed} exceed the model's max_positions={limit}"
                )
            top = int(r.prompt.token_ids.max())
            if top >= self.model_config.vocab_size or int(r.prompt.token_ids.min()) < 0:
                raise ValueError(
                    f"prompt {r.prompt.prompt_id} contains the token id {top}, outside [0, {self.model_config.vocab_size})"
                )


class _Serving:
    """One call of `generate`."""

    def __init__(self, engine: Engine, requests, sampling, bandit, bandit_state, replay_arms, on_launch):
        self.engine, self.config = engine, engine.config
        self.requests, self.sampling = list(requests), sampling
        self.bandit, self.bandit_state = bandit, bandit_state
        self.replay = None if replay_arms is None else list(replay_arms)
        self.on_launch = on_launch
        self.round_config = rounds.RoundConfig(
            engine.model_config, Law.of(sampling, self.config.valid_vocab), self.config.eos_ids, self.config.verification
        )
        self.launches: list[LaunchRecord] = []
        self.rollouts: list[Rollout | None] = [None] * len(self.requests)
        self.clock = _Clock(time.perf_counter())
        self.drafter_names = sorted(engine.drafters)
        self.keys = noise.request_keys(
            self.config.seed,
            [r.prompt.prompt_id for r in self.requests],
            [r.visit for r in self.requests],
            [r.sample for r in self.requests],
        )

    def run(self) -> GenerateResult:
        compiled_before = self.engine.programs.compile_seconds
        for start in range(0, len(self.requests), self.config.max_batch):
            self._wave(list(range(start, min(start + self.config.max_batch, len(self.requests)))))
        stats = RolloutStats(
            tuple(self.launches),
            time.perf_counter() - self.clock.begin,
            self.engine.programs.compile_seconds - compiled_before,
            self.clock.prefill,
            self.clock.device,
            len(self.engine.programs),
        )
        return GenerateResult(self.rollouts, self.bandit_state, stats)

    def _wave(self, members: list[int]) -> None:
        """Runs some requests to their end; `members[b]` is the request of row b, None for rows that only fill the bucket."""
        state, lengths = self._admit(members)
        rows: list[int | None] = members + [None] * (len(lengths) - len(members))
        limits = self._limits(rows)
        running = np.array([m is not None for m in rows])
        passes = np.zeros(len(rows), np.int64)
        committed = np.zeros(len(rows), np.int64)
        missing = {name: int(lengths.max()) for name in self.drafter_names}
        while running.any():
            arm, strategy = self._choose(int(running.sum()))
            needed = self._needed(lengths, limits, running, strategy)
            batch = bucket(int(running.sum()), self.config.batches)
            if batch < len(rows) or needed > state.capacity:
                self._harvest(state, rows, ~running)
                keep = np.flatnonzero(running)
                filler = np.flatnonzero(~running)[: batch - len(keep)]
                order = np.concatenate([keep, filler])
                state = self._reshape(state, order, max(state.capacity, self.config.capacity(needed)))
                rows = [rows[i] if running[i] else None for i in order]
                lengths, limits, running = lengths[order], limits[order], running[order]
                passes, committed = passes[order], committed[order]
            check_capacity(state.capacity, needed)
            state, missing = self._catch_up(state, strategy, missing)
            state, summary, seconds, start, compiled = self._launch(state, strategy)
            new, reason = summary.rows[:, 0], summary.rows[:, 1]
            missing = dict(zip(self.drafter_names, summary.missing.tolist()))
            tokens = int((new - lengths).sum())
            if tokens < 1:
                raise RuntimeError(f"launch {len(self.launches)} ({strategy.name}) committed no token")
            record = LaunchRecord(
                arm=arm,
                running=int(running.sum()),
                batch_bucket=len(rows),
                cache_bucket=state.capacity,
                rounds=int(summary.rounds),
                tokens=tokens,
                seconds=seconds,
                start=start,
                compiled=compiled,
                accept_passes=int((summary.rows[:, 2] - passes).sum()),
                accept_tokens=int((summary.rows[:, 3] - committed).sum()),
            )
            self.launches.append(record)
            if self.replay is None and not compiled:
                self.bandit_state = self.bandit.update(self.bandit_state, arm, record.running, tokens, seconds)
            if self.on_launch is not None:
                self.on_launch(record)
            lengths, passes, committed = new, summary.rows[:, 2], summary.rows[:, 3]
            running = running & (reason == FinishReason.RUNNING)
        self._harvest(state, rows, np.ones(len(rows), bool))

    def _limits(self, rows) -> np.ndarray:
        return np.array(
            [1 if m is None else len(self.requests[m].prompt.token_ids) + self.requests[m].max_new_tokens for m in rows],
            np.int32,
        )

    def _choose(self, running: int) -> tuple[int, Strategy]:
        index = len(self.launches)
        if self.replay is not None:
            if index >= len(self.replay):
                raise ValueError(f"replay_arms has {len(self.replay)} arms but launch {index} needs one more")
            arm = int(self.replay[index])
        elif len(self.config.strategies) == 1:
            arm = 0
        else:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.config.seed), self.engine.version + 1), index)
            arm = int(self.bandit.select(self.bandit_state, key, running))
        if not 0 <= arm < len(self.config.strategies):
            raise ValueError(f"arm {arm} is not one of the {len(self.config.strategies)} strategies")
        return arm, self.config.strategies[arm]

    def _needed(self, lengths, limits, running, strategy: Strategy) -> int:
        """The capacity at which no write of a launch of this strategy passes the end of a running row."""
        n = strategy.depth + 1
        last_start = np.minimum(limits - 1, lengths + (self.config.rounds_per_launch - 1) * n)
        return int(np.max(np.where(running, last_start, 1))) + n

    def _admit(self, members: list[int]) -> tuple[RolloutState, np.ndarray]:
        """Prefills the distinct prompts of `members` and gives each row its copy."""
        began = time.perf_counter()
        compiled = self.engine.programs.compile_seconds
        config, requests = self.config, [self.requests[m] for m in members]
        groups: dict[bytes, int] = {}
        group_of = [groups.setdefault(r.prompt.token_ids.tobytes(), len(groups)) for r in requests]
        prompts = [np.frombuffer(p, np.int32) for p in groups]
        batch = bucket(len(members), config.batches)
        lengths = np.ones(batch, np.int32)
        lengths[: len(members)] = [len(r.prompt.token_ids) for r in requests]
        limits = self._limits(members + [None] * (batch - len(members)))
        running = np.arange(batch) < len(members)
        capacity = config.capacity(self._needed(lengths, limits, running, OFF))

        # The last prompt token goes through the first round, so a prompt of one token needs no prefill.
        width = max(max(len(p) for p in prompts) - 1, 1)
        width = -(-width // config.prefill_bucket) * config.prefill_bucket
        parts, keep = [], self.engine.keeps_hidden
        for start in range(0, len(prompts), config.prefill_batch):
            chunk = prompts[start : start + config.prefill_batch]
            sizes = [1 << i for i in range(config.prefill_batch.bit_length())] + [config.prefill_batch]
            ids = np.zeros((bucket(len(chunk), sizes), width), np.int32)
            for row, prompt in zip(ids, chunk):
                row[: min(len(prompt), width)] = prompt[:width]
            function = functools.partial(rounds.prefill, self.engine.model_config, keep_hidden=keep)
            parts.append(self._program(("prefill", ids.shape), function, (self.engine._params, jnp.asarray(ids))))

        rows = Rows(
            tokens=np.zeros((batch, capacity), np.int32),
            length=lengths,
            limit=limits,
            finish_reason=np.where(running, FinishReason.RUNNING, FinishReason.ABORTED).astype(np.int32),
            request_keys=np.zeros((batch, 2), np.uint32),
            temperature=np.full(batch, self.sampling.temperature, np.float32),
            ignore_eos=np.zeros(batch, bool),
        )
        for row, request in enumerate(requests):
            rows.tokens[row, : lengths[row]] = request.prompt.token_ids
            rows.request_keys[row] = self.keys[members[row]]
            rows.ignore_eos[row] = request.forced_length
        owner = np.zeros(batch, np.int32)
        owner[: len(members)] = group_of

        def start_state(rows, owner, parts):
            cache, hidden = jax.tree.map(lambda *x: jnp.concatenate(x), *parts) if len(parts) > 1 else parts[0]
            return expand(rows, owner, cache, hidden, self.engine.drafters)

        key = ("expand", batch, capacity, width, tuple(p[0].keys[0].shape[0] for p in parts))
        state = self._program(key, start_state, (jax.tree.map(jnp.asarray, rows), jnp.asarray(owner), parts))
        jax.block_until_ready(state.cache)
        spent = time.perf_counter() - began - (self.engine.programs.compile_seconds - compiled)
        self.clock.prefill += spent
        self.clock.device += spent
        return state, lengths

    def _program(self, key, function, args, donate=()):
        return self.engine.programs.get((key, self.sampling_key), function, args, donate)(*args)

    @functools.cached_property
    def sampling_key(self):
        return self.round_config.law

    def _reshape(self, state: RolloutState, order: np.ndarray, capacity: int) -> RolloutState:
        key = ("reshape", state.length.shape[0], state.capacity, len(order), capacity)
        function = functools.partial(reshape, drafters=self.engine.drafters, capacity=capacity)
        began, compiled = time.perf_counter(), self.engine.programs.compile_seconds
        state = self._program(key, function, (state, jnp.asarray(order, jnp.int32)))
        jax.block_until_ready(state.length)
        self.clock.device += time.perf_counter() - began - (self.engine.programs.compile_seconds - compiled)
        return state

    def _catch_up(self, state: RolloutState, strategy: Strategy, missing: dict[str, int]):
        """Before a speculative launch: brings its drafter to where at most one round's worth of entries is missing."""
        if not strategy.speculates:
            return state, missing
        name, n = strategy.drafter, strategy.depth + 1
        drafter = self.engine.drafters[name]
        while missing[name] > n:
            width = min(1 << (missing[name] - 1).bit_length(), 128, state.capacity)
            key = ("catch_up", name, width, state.length.shape[0], state.capacity)
            args = (self.engine._params, self.engine._drafter_params[name], state)
            began, compiled = time.perf_counter(), self.engine.programs.compile_seconds
            state, summary = self._program(key, functools.partial(rounds.catch_up, drafter, width), args, donate=(2,))
            left = dict(zip(self.drafter_names, jax.device_get(summary.missing).tolist()))
            self.clock.device += time.perf_counter() - began - (self.engine.programs.compile_seconds - compiled)
            if left[name] >= missing[name]:
                raise RuntimeError(f"drafter {name!r} did not catch up: {left[name]} entries are missing")
            missing = left
        return state, missing

    def _launch(self, state: RolloutState, strategy: Strategy):
        drafter = rounds.drafter_or_none(strategy, self.engine.drafters)
        own_params = None if drafter is None else self.engine._drafter_params[drafter.name]
        args = (self.engine._params, own_params, state, jnp.int32(self.config.rounds_per_launch))
        key = ("launch", strategy, state.length.shape[0], state.capacity)
        compiled = (key, self.sampling_key) not in self.engine.programs
        function = functools.partial(rounds.launch, self.round_config, strategy, drafter)
        program = self.engine.programs.get((key, self.sampling_key), function, args, donate=(2,))
        began = time.perf_counter()
        state, summary = program(*args)
        summary = jax.device_get(summary)
        seconds = time.perf_counter() - began
        self.clock.device += seconds
        return state, summary, seconds, began - self.clock.begin, compiled

    def _harvest(self, state: RolloutState, rows: list[int | None], finished: np.ndarray) -> None:
        """Turns finished rows into rollouts."""
        wanted = [b for b in np.flatnonzero(finished) if rows[b] is not None]
        if not wanted:
            return
        tokens, log_probs, length, reason, passes, committed = jax.device_get(
            (state.tokens, state.log_probs, state.length, state.finish_reason, state.accept_passes, state.accept_tokens)
        )
        for b in wanted:
            request, n = self.requests[rows[b]], int(length[b])
            p = len(request.prompt.token_ids)
            self.rollouts[rows[b]] = Rollout(
                prompt_id=request.prompt.prompt_id,
                visit=request.visit,
                sample=request.sample,
                group_id=request.group_id,
                token_ids=tokens[b, :n].copy(),
                prompt_length=p,
                response_length=n - p,
                log_probs=log_probs[b, p:n].copy(),
                policy_versions=np.full(n - p, self.engine.version, np.int32),
                finish_reason=FinishReason(int(reason[b])),
                sampling=self.sampling,
                accept_passes=int(passes[b]),
                accept_tokens=int(committed[b]),
            )
