"""One call of `Engine.generate`: the host decides what to launch next, the device does the rest.

Requests are served in waves of at most `max_batch` rows. Each distinct prompt of a wave is prefilled once and its cache given
to all its rows. Then launches of several rounds follow each other; before each, the controller picks a strategy for the
number of rows still running, rows that have finished make room (the batch shrinks to a smaller compiled size) and the cache
grows when a launch could reach its end. The host waits for the device once a launch.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from adrl_jax.bandit.base import Bandit
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import check_capacity
from adrl_jax.rollout import round as rounds
from adrl_jax.rollout.admission import plan_prefill
from adrl_jax.rollout.programs import Programs
from adrl_jax.rollout.settings import EngineConfig, bucket
from adrl_jax.rollout.state import RolloutState, Rows, expand, insert, reshape
from adrl_jax.rollout.stats import LaunchRecord, RolloutStats
from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law
from adrl_jax.speculation.drafter import Drafter
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import FinishReason, Request, Rollout, SamplingParams

_WIDEST_CATCH_UP = 128
_fold_in = jax.jit(jax.random.fold_in)  # compiled: one dispatch a launch


@dataclasses.dataclass(frozen=True)
class Served:
    """An immutable snapshot of what a call of `generate` serves: weights with their versions, and the drafters."""

    model: ModelConfig
    params: Any
    version: int
    drafters: Mapping[str, Drafter]
    drafter_params: Mapping[str, Any]

    @property
    def keeps_hidden(self) -> bool:
        return any(d.uses_hidden for d in self.drafters.values())


@dataclasses.dataclass(frozen=True)
class GenerateResult:
    """What `Engine.generate` returns; `rollouts` are in the order of the requests."""

    rollouts: list[Rollout]
    bandit_state: Any
    stats: RolloutStats


@dataclasses.dataclass
class Slots:
    """The host's mirror of the rows on the device, as of the last launch.

    Attributes:
        request: which request a row serves, -1 for rows that only fill the batch.
        length, limit: tokens known, and the length at which the budget ends.
        running: not finished.
        passes, committed: `accept_passes` and `accept_tokens`.
    """

    request: np.ndarray
    length: np.ndarray
    limit: np.ndarray
    running: np.ndarray
    passes: np.ndarray
    committed: np.ndarray

    def __len__(self) -> int:
        return len(self.request)

    def take(self, rows: np.ndarray) -> "Slots":
        return Slots(*(getattr(self, f.name)[rows] for f in dataclasses.fields(self)))

    def needed(self, strategy: Strategy, launch_rounds: int) -> int:
        """The capacity at which no write of a launch passes the end of a running row.

        A round writes `depth + 1` entries from the last known token on. A row that finishes within the launch stays at most
        at its limit.
        """
        width = strategy.depth + 1
        last_start = np.minimum(self.limit - 1, self.length + (launch_rounds - 1) * width)
        return int(np.max(np.where(self.running, last_start, 1))) + width


class Serving:
    """State of one call; `run` may be called once."""

    def __init__(
        self,
        served: Served,
        config: EngineConfig,
        programs: Programs,
        requests: Sequence[Request],
        sampling: SamplingParams,
        bandit: Bandit,
        bandit_state: Any,
        replay_arms: Sequence[int] | None,
        on_launch: Callable[[LaunchRecord], None] | None,
    ):
        self.served, self.config, self.programs = served, config, programs
        self.requests, self.sampling = list(requests), sampling
        self.bandit, self.bandit_state = bandit, bandit_state
        self.replay = None if replay_arms is None else [int(a) for a in replay_arms]
        self.on_launch = on_launch
        law = Law.of(sampling, config.valid_vocab)
        self.round_config = rounds.RoundConfig(served.model, law, config.eos_ids, config.verification)
        self.bandit_key = jax.random.fold_in(jax.random.key(config.seed), served.version)
        self.launches: list[LaunchRecord] = []
        self.rollouts: list[Rollout | None] = [None] * len(self.requests)
        self.begin = 0.0
        self.device_seconds = self.prefill_seconds = 0.0
        self.keys = noise.request_keys(
            config.seed,
            [r.prompt.prompt_id for r in self.requests],
            [r.visit for r in self.requests],
            [r.sample for r in self.requests],
        )

    def run(self) -> GenerateResult:
        """Finishes all requests."""
        self.begin = time.perf_counter()
        compiled = self.programs.compile_seconds
        for start in range(0, len(self.requests), self.config.max_batch):
            self._wave(np.arange(start, min(start + self.config.max_batch, len(self.requests))))
        stats = RolloutStats(
            launches=tuple(self.launches),
            seconds=time.perf_counter() - self.begin,
            compile_seconds=self.programs.compile_seconds - compiled,
            prefill_seconds=self.prefill_seconds,
            device_seconds=self.device_seconds,
            programs=len(self.programs),
        )
        return GenerateResult(self.rollouts, self.bandit_state, stats)

    def _wave(self, members: np.ndarray) -> None:
        state, slots = self._admit(members)
        missing = dict.fromkeys(self.served.drafters, int(slots.length.max()))
        while slots.running.any():
            arm, strategy = self._choose(int(slots.running.sum()))
            state, slots = self._fit(state, slots, slots.needed(strategy, self.config.rounds_per_launch))
            state, slots, missing = self._launch(state, slots, arm, strategy, missing)
        self._harvest(state, slots)

    def _choose(self, running: int) -> tuple[int, Strategy]:
        index, strategies = len(self.launches), self.config.strategies
        if self.replay is not None:
            if index >= len(self.replay):
                raise ValueError(f"replay_arms has {len(self.replay)} arms, but launch {index} needs one more")
            arm = self.replay[index]
        elif len(strategies) == 1:
            arm = 0
        else:
            key = _fold_in(self.bandit_key, np.uint32(index))
            arm = int(self.bandit.select(self.bandit_state, key, running))
        if not 0 <= arm < len(strategies):
            raise ValueError(f"arm {arm} of launch {index} is not one of the {len(strategies)} strategies")
        return arm, strategies[arm]

    # What runs on the device.

    @contextlib.contextmanager
    def _on_device(self):
        """Counts the time within, compilation excluded, as the device's."""
        began, compiled = time.perf_counter(), self.programs.compile_seconds
        yield
        self.device_seconds += time.perf_counter() - began - (self.programs.compile_seconds - compiled)

    def _admit(self, members: np.ndarray) -> tuple[RolloutState, Slots]:
        """Prefills the distinct prompts of some requests and gives each row its copy."""
        config, requests = self.config, [self.requests[m] for m in members]
        count, batch = len(requests), bucket(len(requests), config.batches)
        slots = Slots(
            request=np.full(batch, -1),
            length=np.ones(batch, np.int32),
            limit=np.ones(batch, np.int32),
            running=np.arange(batch) < count,
            passes=np.zeros(batch, np.int32),
            committed=np.zeros(batch, np.int32),
        )
        slots.request[:count] = members
        slots.length[:count] = [len(r.prompt.token_ids) for r in requests]
        slots.limit[:count] = slots.length[:count] + [r.max_new_tokens for r in requests]
        capacity = config.capacity(slots.needed(OFF, config.rounds_per_launch))
        rows = Rows(
            tokens=np.zeros((batch, capacity), np.int32),
            length=slots.length,
            limit=slots.limit,
            finish_reason=np.where(slots.running, FinishReason.RUNNING, FinishReason.ABORTED).astype(np.int32),
            request_keys=np.zeros((batch, 2), np.uint32),
            temperature=np.full(batch, self.sampling.temperature, np.float32),
            ignore_eos=np.zeros(batch, bool),
        )
        rows.request_keys[:count] = self.keys[members]
        rows.ignore_eos[:count] = [r.forced_length for r in requests]
        for row, request in enumerate(requests):
            rows.tokens[row, : slots.length[row]] = request.prompt.token_ids

        before = self.device_seconds
        with self._on_device():
            state = None
            for part in plan_prefill(requests, batch, config):
                function = functools.partial(rounds.prefill, self.served.model, keep_hidden=self.served.keeps_hidden)
                shape = part.token_ids.shape
                prompts = self.programs(("prefill", shape), function, (self.served.params, part.token_ids))
                if state is None:
                    function = functools.partial(expand, drafters=self.served.drafters)
                    args = (rows, part.source, prompts)
                    state = self.programs(("expand", shape, batch, capacity), function, args)
                else:
                    args = (state, prompts, part.source, part.taken)
                    state = self.programs(("insert", shape, batch, capacity), insert, args, donate=(0,))
            jax.block_until_ready(state.cache)
        self.prefill_seconds += self.device_seconds - before
        return state, slots

    def _fit(self, state: RolloutState, slots: Slots, needed: int) -> tuple[RolloutState, Slots]:
        """Shrinks the batch and grows the cache where a smaller or larger compiled size is due."""
        batch = bucket(int(slots.running.sum()), self.config.batches)
        if batch < len(slots) or needed > state.capacity:
            self._harvest(state, slots)
            filler = np.flatnonzero(~slots.running)
            rows = np.concatenate([np.flatnonzero(slots.running), filler])[:batch].astype(np.int32)
            capacity = max(state.capacity, self.config.capacity(needed))
            key = ("reshape", len(slots), state.capacity, batch, capacity)
            function = functools.partial(reshape, drafters=self.served.drafters, capacity=capacity)
            with self._on_device():
                state = jax.block_until_ready(self.programs(key, function, (state, rows)))
            slots = slots.take(rows)
        check_capacity(state.capacity, needed)
        return state, slots

    def _catch_up(self, state: RolloutState, strategy: Strategy, missing: dict[str, int]) -> RolloutState:
        """Before a speculative launch: brings its drafter to where a round's own catch-up is wide enough.

        The host knows the largest gap from the last launch, so nothing is read here.
        """
        if not strategy.speculates:
            return state
        name, gap = strategy.drafter, missing[strategy.drafter]
        args = (self.served.params, self.served.drafter_params[name])
        while gap > strategy.depth + 1:
            width = min(1 << (gap - 1).bit_length(), _WIDEST_CATCH_UP, state.capacity)
            key = ("catch_up", name, width, state.length.shape[0], state.capacity)
            function = functools.partial(rounds.catch_up, self.served.drafters[name], width)
            with self._on_device():
                state = self.programs(key, function, (*args, state), donate=(2,))
            gap -= width
        return state

    def _launch(self, state: RolloutState, slots: Slots, arm: int, strategy: Strategy, missing: dict[str, int]):
        """Runs some rounds, tells bandit and listener, and returns the state, its slots and the drafters' gaps.

        What the arm's drafter has to catch up on is part of what the launch costs.
        """
        batch, drafters = len(slots), self.served.drafters
        own = self.served.drafter_params[strategy.drafter] if strategy.speculates else None
        key = ("launch", strategy, self.round_config.law, batch, state.capacity)
        function = functools.partial(rounds.launch, self.round_config, strategy, drafters)
        before = len(self.programs), self.programs.compile_seconds
        began = time.perf_counter()
        state = self._catch_up(state, strategy, missing)
        with self._on_device():
            args = (self.served.params, own, state, np.int32(self.config.rounds_per_launch))
            state, packed = self.programs(key, function, args, donate=(2,))
            summary = rounds.unpack_summary(jax.device_get(packed), batch, drafters)
        end = time.perf_counter()
        seconds = end - began - (self.programs.compile_seconds - before[1])
        compiled = len(self.programs) > before[0]
        after = Slots(
            slots.request,
            summary.length,
            slots.limit,
            slots.running & (summary.finish_reason == FinishReason.RUNNING),
            summary.accept_passes,
            summary.accept_tokens,
        )
        record = LaunchRecord(
            arm=arm,
            running=int(slots.running.sum()),
            batch_bucket=batch,
            cache_bucket=state.capacity,
            rounds=summary.rounds,
            tokens=int((after.length - slots.length).sum()),
            seconds=seconds,
            start=end - seconds - self.begin,
            compiled=compiled,
            accept_passes=int((after.passes - slots.passes).sum()),
            accept_tokens=int((after.committed - slots.committed).sum()),
        )
        if record.tokens < 1:
            raise RuntimeError(f"launch {len(self.launches)} ({strategy.name}) committed no token")
        self.launches.append(record)
        # The first run of a program touches memory for the first time: not what the arm costs.
        if self.replay is None and not compiled:
            self.bandit_state = self.bandit.update(self.bandit_state, arm, record.running, record.tokens, seconds)
        if self.on_launch is not None:
            self.on_launch(record)
        return state, after, summary.missing

    def _harvest(self, state: RolloutState, slots: Slots) -> None:
        """Turns finished rows into rollouts."""
        finished = np.flatnonzero(~slots.running & (slots.request >= 0))
        if not len(finished):
            return
        tokens, log_probs, reason = jax.device_get((state.tokens, state.log_probs, state.finish_reason))
        for row in finished:
            index, n = slots.request[row], int(slots.length[row])
            request = self.requests[index]
            p = len(request.prompt.token_ids)
            self.rollouts[index] = Rollout(
                prompt_id=request.prompt.prompt_id,
                visit=request.visit,
                sample=request.sample,
                group_id=request.group_id,
                token_ids=tokens[row, :n].copy(),
                prompt_length=p,
                response_length=n - p,
                log_probs=log_probs[row, p:n].copy(),
                policy_versions=np.full(n - p, self.served.version, np.int32),
                finish_reason=FinishReason(int(reason[row])),
                sampling=self.sampling,
                accept_passes=int(slots.passes[row]),
                accept_tokens=int(slots.committed[row]),
            )
            slots.request[row] = -1
