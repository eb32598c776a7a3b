"""One call of `Engine.generate`: the host decides what to launch next, the device does the rest.

Requests wait in a queue for one of `max_batch` rows. Whenever rows are free, the prompts of those next in line go through the
target, each distinct prompt once, and their caches are written into the rows. Then a launch of several rounds follows; before
it, the controller picks a strategy for the number of rows running. When nobody waits, rows that have finished make room (the
batch shrinks to a smaller compiled size), and the cache grows when a launch could reach its end. The host waits for the
device once a launch. Nothing is prefilled again because speculation was switched on or off: drafters catch up when asked.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from adrl_jax.bandit.base import Bandit, Context
from adrl_jax.models.kv_cache import check_capacity
from adrl_jax.rollout import references, refresh
from adrl_jax.rollout import round as rounds
from adrl_jax.rollout.admission import Queue
from adrl_jax.rollout.declared import WIDEST_CATCH_UP
from adrl_jax.rollout.entrance import Entrance
from adrl_jax.rollout.in_flight import Versions, rewrite
from adrl_jax.rollout.programs import Programs
from adrl_jax.rollout.served import Flow, GenerateResult, Served
from adrl_jax.rollout.settings import EngineConfig, bucket
from adrl_jax.rollout.slots import Slots
from adrl_jax.rollout.state import RolloutState, reshape
from adrl_jax.rollout.stats import Event, LaunchRecord, RolloutStats, report_of
from adrl_jax.sampling.law import Law
from adrl_jax.speculation.history_store import HistoryStore
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import FinishReason, Request, Rollout, SamplingParams

_fold_in = jax.jit(jax.random.fold_in)  # compiled: one dispatch a launch


class Serving(Entrance):
    """State of one call; `run` may be called once.

    Attributes:
        collect: see `Engine.collect`.
    """

    collect: Callable[[Rollout, np.ndarray], None] | None = None

    def __init__(
        self,
        served: Served,
        config: EngineConfig,
        programs: Programs,
        requests: Sequence[Request],
        sampling: SamplingParams,
        bandit: Bandit,
        bandit_state: Any,
        replay_arms: Sequence[int] | None = None,
        on_launch: Callable[[LaunchRecord], None] | None = None,
        expected_tokens: Sequence[float] | None = None,
        history: HistoryStore | None = None,
        flow: Flow | None = None,
        published: Callable[[], Served] | None = None,
    ):
        """
        Args:
            published: what the engine serves now, for `flow.cache`.

        Others as in `Engine.generate`.
        """
        self.served, self.config, self.programs = served, config, programs
        self.sampling, self.flow = sampling, Flow() if flow is None else flow
        self.published = published if self.flow.cache else None
        self.bandit, self.bandit_state = bandit, bandit_state
        self.replay = None if replay_arms is None else [int(a) for a in replay_arms]
        self.on_launch = on_launch
        self.history = history
        self.readers = references.readers(served.drafters)
        law = Law.of(sampling, config.valid_vocab)
        self.round_config = rounds.RoundConfig(
            served.model, law, config.eos_ids, config.verification, config.simulate_acceptance, config.kernels
        )
        self.bandit_key = jax.random.fold_in(jax.random.key(config.seed), served.version)
        self.deepest = max(1, *(s.depth for s in config.strategies))
        self.queue = Queue(requests, config, expected_tokens)
        self.launches: list[LaunchRecord] = []
        self.events: list[Event] = []
        self.rollouts: dict[int, Rollout] = {}
        self.known: dict[int, refresh.Known] = {}
        self.versions = Versions()
        self.begin, self.done = 0.0, 0
        self.drafts = np.zeros(3, np.int64)
        self.slots = Slots.empty(bucket(min(max(len(requests), 1), config.max_batch), config.batches))
        self.state: RolloutState | None = None
        self.missing = dict.fromkeys(served.drafters, 0)

    def run(self) -> GenerateResult:
        """Finishes all requests."""
        self.begin = time.perf_counter()
        compiled = self.programs.compile_seconds
        while self._take_in():
            if self.published is not None:
                self._swap(self.published())
            if len(self.queue):
                self._admit()
            if self.slots.running.any():
                arm, strategy = self._choose()
                self._fit(self.slots.needed(strategy, self.config.rounds_per_launch))
                self._launch(arm, strategy)
                if self.flow.finished is not None:
                    self._harvest()
        self._harvest()
        stats = RolloutStats(
            launches=tuple(self.launches),
            seconds=time.perf_counter() - self.begin,
            compile_seconds=self.programs.compile_seconds - compiled,
            prefill_seconds=sum(e.seconds for e in self.events if e.kind in ("prefill", "admit")),
            device_seconds=sum(e.seconds for e in self.events),
            programs=len(self.programs),
            events=tuple(self.events),
            drafts=tuple(self.drafts.tolist()),
        )
        return GenerateResult([self.rollouts[i] for i in sorted(self.rollouts)], self.bandit_state, stats)

    def _take_in(self) -> bool:
        """Asks for more requests where there is room; False when all work is done."""
        running = int(self.slots.running.sum())
        busy = bool(len(self.queue) or running)
        room = self.config.max_batch - running - len(self.queue)
        if self.flow.feed is None or room <= 0:
            return busy
        fresh = self.flow.feed(room, not busy)
        if fresh is None:
            return busy
        self.queue.extend(fresh)
        return True

    def _swap(self, fresh: Served) -> None:
        """Goes on with what is published now."""
        if fresh is self.served:
            return
        self._harvest()
        other = fresh.version != self.served.version  # else only drafters are new
        if other:
            rows = self.slots.request >= 0
            self.versions.mark(self.slots.request[rows], self.slots.length[rows], self.served.version)
        self.served = fresh
        if other and self.flow.cache == "recompute":
            self.queue.restart()
            self._recompute()

    def _recompute(self) -> None:
        """The cache of running rows by the weights that serve now, in pieces of one width."""
        if self.state is None or not self.slots.running.any():
            return
        longest, width = int(self.slots.length[self.slots.running].max()), self.config.cache_bucket
        key = ("rewrite", len(self.slots), self.state.capacity)
        function = functools.partial(rewrite, self.served.model, width)
        with self._on_device("prefill", prompts=int(self.slots.running.sum()), tokens=longest):
            for start in range(0, longest, width):
                args = (self.served.params, self.state, np.int32(start))
                self.state = self.programs(key, function, args, donate=(1,))
            jax.block_until_ready(self.state)
        kept = {name: getattr(d, "keeps_entries", True) for name, d in self.served.drafters.items()}
        self.missing = {name: longest if kept[name] else 0 for name in self.missing}

    def _choose(self) -> tuple[int, Strategy]:
        index, strategies = self.done, self.config.strategies
        if self.replay is not None:
            if index >= len(self.replay):
                raise ValueError(f"replay_arms has {len(self.replay)} arms, but launch {index} needs one more")
            arm = self.replay[index]
        elif len(strategies) == 1:
            arm = 0
        else:
            key = _fold_in(self.bandit_key, np.uint32(index))
            cache = max(self.state.capacity, self.config.capacity(self.slots.needed(OFF, self.config.rounds_per_launch)))
            running = int(self.slots.running.sum())
            gaps = np.array([self._gap(s) for s in strategies], np.float32)
            arm = int(self.bandit.select(self.bandit_state, key, Context(running, self._batch(), cache, gaps)))
        if not 0 <= arm < len(strategies):
            raise ValueError(f"arm {arm} of launch {index} is not one of the {len(strategies)} strategies")
        return arm, strategies[arm]

    def _batch(self) -> int:
        """Rows of the next launch: rows are kept for those who wait, else the smallest compiled size will do."""
        running = int(self.slots.running.sum())
        return len(self.slots) if len(self.queue) else bucket(max(running, 1), self.config.batches)

    def _enough(self) -> int:
        """Rows running at which a launch ends early: a smaller compiled batch will do, or a quarter of the rows is free for
        those who wait."""
        running, batch = int(self.slots.running.sum()), len(self.slots)
        if len(self.queue):
            return max(min(running - 1, batch - 1 - batch // 4), 0)
        return max((b for b in self.config.batches if b < running), default=0)

    # What runs on the device.

    @contextlib.contextmanager
    def _on_device(self, kind: str, **facts):
        """Counts the time within, compilation excluded, as the device's."""
        began, compiled = time.perf_counter(), self.programs.compile_seconds
        yield
        end = time.perf_counter()
        seconds = end - began - (self.programs.compile_seconds - compiled)
        self.events.append(Event(kind, end - seconds - self.begin, seconds, facts))

    def _fit(self, needed: int) -> None:
        """Shrinks the batch and grows the cache where a smaller or larger compiled size is due."""
        batch, slots = self._batch(), self.slots
        if batch < len(slots) or needed > self.state.capacity:
            self._harvest()
            free = np.flatnonzero(~slots.running)
            self._reshape(np.concatenate([np.flatnonzero(slots.running), free])[:batch], needed)
        check_capacity(self.state.capacity, needed)

    def _reshape(self, rows: np.ndarray, needed: int) -> None:
        state = self.state
        capacity = max(state.capacity, self.config.capacity(needed))
        key = ("reshape", len(self.slots), state.capacity, len(rows), capacity)
        function = functools.partial(reshape, drafters=self.served.drafters, capacity=capacity)
        with self._on_device("reshape", rows=len(rows), capacity=capacity):
            self.state = jax.block_until_ready(self.programs(key, function, (state, rows.astype(np.int32))))
        self.slots = self.slots.take(rows)

    def _gap(self, strategy: Strategy) -> int:
        """Tokens a row that the strategy's drafter has to be caught up on; 0 where a round's own catch-up is wide enough.

        The host knows the largest gap from the last launch, so nothing is read here.
        """
        gap = self.missing[strategy.drafter] if strategy.speculates else 0
        return gap if gap > strategy.depth + 1 else 0

    def _catch_up(self, strategy: Strategy) -> None:
        """Before a speculative launch: brings its drafter to where a round's own catch-up is wide enough."""
        name, gap = strategy.drafter, self._gap(strategy)
        if not gap:
            return
        args = (self.served.params, self.served.drafter_params[name])
        with self._on_device("catch_up", drafter=name, tokens=gap):
            while gap > strategy.depth + 1:
                width = min(1 << (gap - 1).bit_length(), WIDEST_CATCH_UP, self.state.capacity)
                key = ("catch_up", name, width, len(self.slots), self.state.capacity)
                function = functools.partial(rounds.catch_up, self.served.drafters[name], width)
                self.state = self.programs(key, function, (*args, self.state), donate=(2,))
                gap -= width
            jax.block_until_ready(self.state)

    def _refer(self, strategy: Strategy) -> None:
        """Before a launch that looks things up: gives rows what was answered to their prompts since they were given last."""
        if strategy.drafter not in self.readers or self.history is None or not self.slots.behind.any():
            return
        rows = [self.requests[i] if i >= 0 else None for i in self.slots.request]
        found = {name: references.gather(self.history, rows, drafter) for name, drafter in self.readers.items()}
        key = ("references", len(self.slots), self.state.capacity)
        function = functools.partial(references.give, self.served.drafters)
        with self._on_device("references", rows=int(self.slots.behind.sum())):
            args = (self.state, self.slots.behind, found)
            self.state = jax.block_until_ready(self.programs(key, function, args, donate=(0,)))
        self.slots.behind[:] = False

    def _launch(self, arm: int, strategy: Strategy) -> None:
        """Runs some rounds and tells bandit and listener."""
        slots, drafters = self.slots, self.served.drafters
        batch, capacity = len(slots), self.state.capacity
        own = self.served.drafter_params[strategy.drafter] if strategy.speculates else None
        key = ("launch", strategy, self.round_config.law, batch, capacity)
        function = functools.partial(rounds.launch, self.round_config, strategy, drafters)
        before, gap = (len(self.programs), self.programs.compile_seconds), self._gap(strategy)
        began = time.perf_counter()
        self._refer(strategy)
        self._catch_up(strategy)
        caught_up = time.perf_counter() - began - (self.programs.compile_seconds - before[1])
        kind = "speculate" if strategy.speculates else "plain"
        with self._on_device(kind, arm=strategy.name, running=int(slots.running.sum()), rows=batch):
            args = (self.served.params, own, self.state, np.int32(self.config.rounds_per_launch), np.int32(self._enough()))
            self.state, packed = self.programs(key, function, args, donate=(2,))
            summary = rounds.unpack_summary(np.array(jax.device_get(packed)), batch, strategy.depth, drafters)
        end = time.perf_counter()
        seconds = end - began - (self.programs.compile_seconds - before[1])
        after = Slots(
            slots.request,
            summary.length,
            slots.limit,
            slots.running & (summary.finish_reason == FinishReason.RUNNING),
            summary.accept_passes,
            summary.accept_tokens,
            slots.behind,
        )
        record = LaunchRecord(
            arm=arm,
            running=int(slots.running.sum()),
            batch_bucket=batch,
            cache_bucket=capacity,
            rounds=summary.rounds,
            tokens=int((after.length - slots.length).sum()),
            seconds=seconds,
            start=end - seconds - self.begin,
            compiled=len(self.programs) > before[0],
            accept_passes=int((after.passes - slots.passes).sum()),
            accept_tokens=int((after.committed - slots.committed).sum()),
            examined=tuple(summary.examined.tolist()),
            accepted=tuple(summary.accepted.tolist()),
            faults=summary.faults,
            catch_up_seconds=caught_up,
            catch_up_tokens=gap,
        )
        if record.tokens < 1:
            raise RuntimeError(f"launch {self.done} ({strategy.name}) committed no token")
        self.done += 1
        if self.flow.feed is None:  # else they would pile up
            self.launches.append(record)
        else:
            self.events.clear()
        self.slots, self.missing = after, summary.missing
        # The first run of a program touches memory for the first time: not what the arm costs.
        if self.replay is None and not record.compiled:
            self.bandit_state = self.bandit.update(self.bandit_state, report_of(record, self.deepest))
        if self.on_launch is not None:
            self.on_launch(record)

    def _harvest(self) -> None:
        """Turns finished rows into rollouts."""
        slots = self.slots
        finished = np.flatnonzero(~slots.running & (slots.request >= 0))
        if not len(finished):
            return
        tokens, log_probs, reason = jax.device_get((self.state.tokens, self.state.log_probs, self.state.finish_reason))
        hidden = None if self.collect is None or self.state.hidden is None else jax.device_get(self.state.hidden)
        answered = set()
        for row in finished:
            index, n = int(slots.request[row]), int(slots.length[row])
            request = self.requests[index]
            answered.add(request.prompt.prompt_id)
            p = len(request.prompt.token_ids)
            spoken = log_probs[row, p:n].copy()
            if index in self.known:
                verified = self.known.pop(index).log_probs
                spoken[: len(verified)] = verified
            counts = int(slots.passes[row]), int(slots.committed[row])
            versions = self.versions.of(index, p, n, self.served.version)
            found = self._finish(index, tokens[row, p:n], spoken, FinishReason(int(reason[row])), versions, *counts)
            if hidden is not None:
                self.collect(found, hidden[row, : n - 1])
            slots.request[row] = -1
        if self.history is not None:
            rows = [self.requests[i] if i >= 0 else None for i in slots.request]
            slots.behind |= references.behind(answered, rows)

    def _finish(
        self, index: int, tokens, log_probs, reason: FinishReason, versions, passes: int = 0, committed: int = 0
    ) -> Rollout:
        """A request has its response: tokens and log-probs `[R]`, versions `[R]` or one for all."""
        request, ids = self.requests[index], self.requests[index].prompt.token_ids
        rollout = Rollout(
            prompt_id=request.prompt.prompt_id,
            visit=request.visit,
            sample=request.sample,
            group_id=request.group_id,
            token_ids=np.concatenate([ids, tokens]),
            prompt_length=len(ids),
            response_length=len(tokens),
            log_probs=log_probs,
            policy_versions=np.array(np.broadcast_to(versions, len(tokens)), np.int32),
            finish_reason=reason,
            sampling=self.sampling,
            accept_passes=passes,
            accept_tokens=committed,
            noise_visit=request.noise_visit,
        )
        if self.history is not None:
            self.history.add(rollout)
        if self.flow.finished is None:
            self.rollouts[index] = rollout
        else:
            self.queue.forget(index)
            self.flow.finished([(index, rollout)])
        return rollout
