"""How requests get their rows: prompts (and drafts to be verified) go through the target, caches go into rows.

One half of a call of `Engine.generate`; `serving.Serving` is the other.
"""

import abc
import contextlib
import functools
from collections.abc import Sequence

import jax
import numpy as np

from adrl_jax.rollout import refresh
from adrl_jax.rollout import round as rounds
from adrl_jax.rollout.admission import Part, Queue
from adrl_jax.rollout.in_flight import Versions
from adrl_jax.rollout.programs import Programs
from adrl_jax.rollout.served import Served
from adrl_jax.rollout.settings import EngineConfig, bucket
from adrl_jax.rollout.slots import Slots
from adrl_jax.rollout.state import Admitted, RolloutState, admit, empty, more_rows
from adrl_jax.sampling import noise
from adrl_jax.speculation.strategy import OFF
from adrl_jax.types import FinishReason, Request, SamplingParams


class Entrance(abc.ABC):
    """The state of a call as far as entering goes.

    Attributes:
        queue: requests without a row.
        slots, state: the rows, as the host and as the device know them.
        known: verified beginnings of responses, by request, until their rows are harvested.
        drafts: tokens of drafts, those that stood, and those that the serving policy would not draw: int64 `[3]`.
        missing: by drafter, the most entries any running row lacks.
    """

    config: EngineConfig
    programs: Programs
    served: Served
    sampling: SamplingParams
    round_config: rounds.RoundConfig
    queue: Queue
    slots: Slots
    state: RolloutState | None
    known: dict[int, refresh.Known]
    versions: Versions
    drafts: np.ndarray
    missing: dict[str, int]

    @property
    def requests(self) -> Sequence[Request]:
        """All that came, in order of arrival; None in place of those that have been answered in a flow."""
        return self.queue.requests

    @abc.abstractmethod
    def _on_device(self, kind: str, **facts) -> contextlib.AbstractContextManager:
        """Counts the time within as the device's."""

    @abc.abstractmethod
    def _harvest(self) -> None:
        """Turns finished rows into rollouts."""

    @abc.abstractmethod
    def _finish(
        self, index: int, tokens, log_probs, reason: FinishReason, versions, passes: int = 0, committed: int = 0
    ) -> None:
        """A request has its response: tokens and log-probs `[R]`, versions `[R]` or one for all."""

    @abc.abstractmethod
    def _reshape(self, rows: np.ndarray, needed: int) -> None:
        """Keeps `rows`, with room for `needed` tokens each."""

    def _admit(self) -> None:
        """Gives free rows to those who wait, as far as their prompts are through the target; moves prompts on."""
        wanted = bucket(min(int(self.slots.running.sum()) + len(self.queue), self.config.max_batch), self.config.batches)
        if wanted > len(self.slots):
            self._grow(wanted)
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
            if members:
                self._put(part, rows, members)
        self.queue.release()

    def _grow(self, batch: int) -> None:
        """More rows: more requests came after the batch had shrunk."""
        if self.state is not None:
            key = ("more_rows", len(self.slots), self.state.capacity, batch)
            function = functools.partial(more_rows, batch=batch)
            with self._on_device("reshape", rows=batch, capacity=self.state.capacity):
                self.state = jax.block_until_ready(self.programs(key, function, (self.state,)))
        self.slots = self.slots.grown(batch)

    def _prefill(self, part: Part) -> None:
        """Runs the part's prompts, or the next piece of them, through the target; judges drafts when all of it is through."""
        served, (count, width) = self.served, part.token_ids.shape
        size = min(self.config.prefill_chunk or width, width - part.done)
        ids = part.token_ids[:, part.done : part.done + size]
        drafted = bool(part.drafts)
        keep = served.keeps_hidden or drafted
        kind = "draft_" if drafted else ""
        with self._on_device("prefill", prompts=count, tokens=size):
            if part.done == 0:
                function = functools.partial(rounds.prefill, served.model, width, keep)
                part.prefilled = self.programs((kind + "prefill", (count, size), width), function, (served.params, ids))
            else:
                function = functools.partial(rounds.continue_prefill, served.model)
                args = (served.params, ids, part.prefilled, np.full(count, part.done, np.int32))
                key = (kind + "continue_prefill", (count, size), width)
                part.prefilled = self.programs(key, function, args, donate=(2,))
            jax.block_until_ready(part.prefilled)
        part.done += size
        if drafted and part.ready:
            self._judge(part)

    def _judge(self, part: Part) -> None:
        """Which of the part's drafts stand, and how far."""
        requests = [self.requests[i] for i in part.drafts]
        count, width = part.token_ids.shape
        first = np.int32(min(len(r.prompt.token_ids) for r in requests) - 1)  # its choice is the first token of a response
        temperature = np.full(count, self.sampling.temperature, np.float32)
        with self._on_device("prefill", drafts=count):
            args = (self.served.params, part.prefilled.hidden, first, self._keys(part.drafts), temperature)
            function = functools.partial(refresh.choices, self.round_config.law)
            own = jax.device_get(self.programs(("choices", count, width, self.round_config.law), function, args))
        if not self.served.keeps_hidden:
            part.prefilled = part.prefilled._replace(hidden=None)
        for index, request, tokens, log_probs in zip(part.drafts, requests, *own):
            known = refresh.judge(request, tokens, log_probs, self.config.eos_ids)
            self.drafts += np.array([len(request.draft), known.kept, known.differing])
            if known.finish_reason == FinishReason.RUNNING:
                self.known[index] = known
                self.versions.restart(index, len(request.prompt.token_ids) + len(known.token_ids), self.served.version)
                continue
            self.queue.skip(index)
            self._finish(index, known.token_ids, known.log_probs, known.finish_reason, self.served.version)

    def _keys(self, indices: Sequence[int]) -> np.ndarray:
        """The requests' noise, uint32 `[n, 2]`."""
        found = [self.requests[i] for i in indices]
        visits = [r.visit if r.noise_visit is None else r.noise_visit for r in found]
        return noise.request_keys(self.config.seed, [r.prompt.prompt_id for r in found], visits, [r.sample for r in found])

    def _text(self, index: int) -> np.ndarray:
        """What is known of a request when it gets a row: int32, prompt and verified response."""
        ids = self.requests[index].prompt.token_ids
        return np.concatenate([ids, self.known[index].token_ids]) if index in self.known else ids

    def _put(self, part: Part, rows: np.ndarray, members: Sequence[tuple[int, int]]) -> None:
        """Lets requests begin in free rows."""
        config, slots, served = self.config, self.slots, self.served
        indices, count = [i for i, _ in members], len(members)
        texts = [self._text(i) for i in indices]
        slots.put(rows, indices, self.requests, [len(t) for t in texts])
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
        fresh.request_keys[:count] = self._keys(indices)
        for k, (index, ids) in enumerate(zip(indices, texts)):
            fresh.tokens[k, : len(ids)] = ids
            fresh.ignore_eos[k] = self.requests[index].forced_length
        key = ("admit", part.token_ids.shape, size, batch, capacity)
        with self._on_device("admit", rows=count):
            args = (self.state, fresh, part.prefilled)
            self.state = jax.block_until_ready(self.programs(key, admit, args, donate=(0,)))
        gap = int(slots.length[rows].max())
        kept = {name: getattr(d, "keeps_entries", True) for name, d in served.drafters.items()}
        self.missing = {name: max(gap, n) if kept[name] else 0 for name, n in self.missing.items()}
