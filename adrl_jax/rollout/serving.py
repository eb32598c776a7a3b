"""One call of `Engine.generate`: the host decides what to launch next, the device does the rest.

Requests wait in a queue for one of `max_batch` rows. Whenever rows are free, the prompts of those next in line go through the
target, each distinct prompt once, and their caches are written into the rows. Then a launch of several rounds follows; before
it, the controller picks a strategy for the number of rows running. When nobody waits, rows that have finished make room (the
batch shrinks to a smaller compiled size), and the cache grows when a launch could reach its end. The host waits for the
device once a launch. Nothing is prefilled again because speculation was switched on or off: drafters catch up when asked.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from adrl_jax.bandit.base import Bandit, Context
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import check_capacity
from adrl_jax.rollout import references
from adrl_jax.rollout import round as rounds
from adrl_jax.rollout.admission import Part, Queue
from adrl_jax.rollout.declared import WIDEST_CATCH_UP
from adrl_jax.rollout.programs import Programs
from adrl_jax.rollout.settings import EngineConfig, bucket
from adrl_jax.rollout.slots import Slots
from adrl_jax.rollout.state import Admitted, RolloutState, admit, empty, reshape
from adrl_jax.rollout.stats import Event, LaunchRecord, RolloutStats, report_of
from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law
from adrl_jax.speculation.drafter import Drafter
from adrl_jax.speculation.history_store import HistoryStore
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import FinishReason, Request, Rollout, SamplingParams

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


class Serving:
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
    ):
        self.served, self.config, self.programs = served, config, programs
        self.requests, self.sampling = list(requests), sampling
        self.bandit, self.bandit_state = bandit, bandit_state
        self.replay = None if replay_arms is None else [int(a) for a in replay_arms]
        self.on_launch = on_launch
        self.history = history
        self.readers = references.readers(served.drafters)
        law = Law.of(sampling, config.valid_vocab)
        self.round_config = rounds.RoundConfig(
            served.model, law, config.eos_ids, config.verification, config.simulate_acceptance
        )
        self.bandit_key = jax.random.fold_in(jax.random.key(config.seed), served.version)
        self.deepest = max(1, *(s.depth for s in config.strategies))
        self.queue = Queue(self.requests, config, expected_tokens)
        self.launches: list[LaunchRecord] = []
        self.events: list[Event] = []
        self.rollouts: list[Rollout | None] = [None] * len(self.requests)
        self.begin = 0.0
        self.keys = noise.request_keys(
            config.seed,
            [r.prompt.prompt_id for r in self.requests],
            [r.visit if r.noise_visit is None else r.noise_visit for r in self.requests],
            [r.sample for r in self.requests],
        )
        self.slots = Slots.empty(bucket(min(len(self.requests), config.max_batch), config.batches))
        self.state: RolloutState | None = None
        self.missing = dict.fromkeys(served.drafters, 0)

    def run(self) -> GenerateResult:
        """Finishes all requests."""
        self.begin = time.perf_counter()
        compiled = self.programs.compile_seconds
        while len(self.queue) or self.slots.running.any():
            if len(self.queue):
                self._admit()
            if self.slots.running.any():
                arm, strategy = self._choose()
                self._fit(self.slots.needed(strategy, self.config.rounds_per_launch))
                self._launch(arm, strategy)
        self._harvest()
        stats = RolloutStats(
            launches=tuple(self.launches),
            seconds=time.perf_counter() - self.begin,
            compile_seconds=self.programs.compile_seconds - compiled,
            prefill_seconds=sum(e.seconds for e in self.events if e.kind in ("prefill", "admit")),
            device_seconds=sum(e.seconds for e in self.events),
            programs=len(self.programs),
            events=tuple(self.events),
        )
        return GenerateResult(self.rollouts, self.bandit_state, stats)

    def _choose(self) -> tuple[int, Strategy]:
        index, strategies = len(self.launches), self.config.strategies
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
            arm = int(self.bandit.select(self.bandit_state, key, Context(running, self._batch(), cache)))
        if not 0 <= arm < len(strategies):
            raise ValueError(f"arm {arm} of launch {index} is not one of the {len(strategies)} strategies")
        return arm, strategies[arm]

    def _batch(self) -> int:
        """Rows of the next launch: rows are kept for those who wait, else the smallest compiled size will do."""
        return len(self.slots) if len(self.queue) else bucket(int(self.slots.running.sum()), self.config.batches)

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

    def _admit(self) -> None:
        """Gives free rows to those who wait, as far as their prompts are through the target; moves prompts on."""
        free = np.flatnonzero(~self.slots.running)
        if not len(free):
            return
        self._harvest()
        self.queue.begin_prefill(len(free))
        while (part := self.queue.next_part()) is not None:
            self._prefill(part)
            if self.config.prefill_chunk is not None and self.slots.running.any():
                break  # the rest waits until those who run had their turn
        for part, members in self.queue.admissible(len(free)):
            rows, free = free[: len(members)], free[len(members) :]
            self._put(part, rows, members)
        self.queue.release()

    def _prefill(self, part: Part) -> None:
        """Runs the part's prompts, or the next piece of them, through the target."""
        served, (count, width) = self.served, part.token_ids.shape
        size = min(self.config.prefill_chunk or width, width - part.done)
        ids = part.token_ids[:, part.done : part.done + size]
        with self._on_device("prefill", prompts=count, tokens=size):
            if part.done == 0:
                function = functools.partial(rounds.prefill, served.model, width, served.keeps_hidden)
                part.prefilled = self.programs(("prefill", (count, size), width), function, (served.params, ids))
            else:
                function = functools.partial(rounds.continue_prefill, served.model)
                args = (served.params, ids, part.prefilled, np.full(count, part.done, np.int32))
                key = ("continue_prefill", (count, size), width)
                part.prefilled = self.programs(key, function, args, donate=(2,))
            jax.block_until_ready(part.prefilled)
        part.done += size

    def _put(self, part: Part, rows: np.ndarray, members: Sequence[tuple[int, int]]) -> None:
        """Lets requests begin in free rows."""
        config, slots, served = self.config, self.slots, self.served
        indices, count = [i for i, _ in members], len(members)
        slots.put(rows, indices, self.requests)
        needed = slots.needed(OFF, config.rounds_per_launch)
        batch = len(slots)
        if self.state is None:
            capacity = config.capacity(needed)
            function = functools.partial(empty, served.model, batch, capacity, served.drafters, served.keeps_hidden)
            with self._on_device("admit", rows=0):
                self.state = jax.block_until_ready(self.programs(("empty", batch, capacity), function, ()))
        elif needed > self.state.capacity:
            self._reshape(np.arange(batch), needed)
        size, capacity = 1 << (count - 1).bit_length(), self.state.capacity
        fresh = Admitted(
            row=np.full(size, batch, np.int32),
            source=np.zeros(size, np.int32),
            tokens=np.zeros((size, capacity), np.int32),
            length=np.ones(size, np.int32),
            limit=np.ones(size, np.int32),
            request_keys=np.zeros((size, 2), np.uint32),
            temperature=np.full(size, self.sampling.temperature, np.float32),
            ignore_eos=np.zeros(size, bool),
        )
        fresh.row[:count] = rows
        fresh.source[:count] = [place for _, place in members]
        fresh.length[:count], fresh.limit[:count] = slots.length[rows], slots.limit[rows]
        fresh.request_keys[:count] = self.keys[indices]
        for k, index in enumerate(indices):
            ids = self.requests[index].prompt.token_ids
            fresh.tokens[k, : len(ids)] = ids
            fresh.ignore_eos[k] = self.requests[index].forced_length
        key = ("admit", part.token_ids.shape, size, batch, capacity)
        with self._on_device("admit", rows=count):
            args = (self.state, fresh, part.prefilled)
            self.state = jax.block_until_ready(self.programs(key, admit, args, donate=(0,)))
        gap = int(slots.length[rows].max())
        kept = {name: getattr(d, "keeps_entries", True) for name, d in served.drafters.items()}
        self.missing = {name: max(gap, n) if kept[name] else 0 for name, n in self.missing.items()}

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

    def _catch_up(self, strategy: Strategy) -> None:
        """Before a speculative launch: brings its drafter to where a round's own catch-up is wide enough.

        The host knows the largest gap from the last launch, so nothing is read here.
        """
        if not strategy.speculates or self.missing[strategy.drafter] <= strategy.depth + 1:
            return
        name, gap = strategy.drafter, self.missing[strategy.drafter]
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
        before = len(self.programs), self.programs.compile_seconds
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
        )
        if record.tokens < 1:
            raise RuntimeError(f"launch {len(self.launches)} ({strategy.name}) committed no token")
        self.launches.append(record)
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
        done = slots.request[finished]
        tokens, log_probs, reason = jax.device_get((self.state.tokens, self.state.log_probs, self.state.finish_reason))
        hidden = None if self.collect is None or self.state.hidden is None else jax.device_get(self.state.hidden)
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
                noise_visit=request.noise_visit,
            )
            slots.request[row] = -1
            if hidden is not None:
                self.collect(self.rollouts[index], hidden[row, : n - 1])
            if self.history is not None:
                self.history.add(self.rollouts[index])
        if self.history is not None:
            answered = {self.rollouts[i].prompt_id for i in done}
            rows = [self.requests[i] if i >= 0 else None for i in slots.request]
            slots.behind |= references.behind(answered, rows)
