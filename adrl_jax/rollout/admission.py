"""Which requests run next, and which prompts go through the target together. Host code on numpy."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from adrl_jax.rollout.settings import EngineConfig, round_up
from adrl_jax.types import Request


@dataclasses.dataclass(eq=False)
class Part:
    """Prompts of one prefill, kept until every request that shares one of them has its row.

    Attributes:
        token_ids: int32 `[P, W]`, padded at the end. The last token of a prompt is left to the first decoding round.
        keys: what each of the P prompts is known by in the queue.
        drafts: the request of each row where rows hold prompts with drafts to be verified, else empty.
        done: how many of the W places have been through the target.
        prefilled: what the target made of them so far.
    """

    token_ids: np.ndarray
    keys: tuple[bytes, ...]
    drafts: tuple[int, ...] = ()
    done: int = 0
    prefilled: object = None

    @property
    def ready(self) -> bool:
        return self.done == self.token_ids.shape[1]


class Queue:
    """Requests that have no row yet, in the order in which they get one.

    A prompt is prefilled once for all requests of the call that share it: its cache stays while one of them waits.
    """

    def __init__(self, requests: Sequence[Request], config: EngineConfig, expected: Sequence[float] | None = None):
        """
        Args:
            expected: response tokens expected of each request, for the order `longest_first`; None means its budget.

        Raises:
            ValueError: `expected` has another length than `requests`, or a value that is not a number.
        """
        self.requests, self.config = list(requests), config
        order = range(len(requests))
        if config.admission == "longest_first":
            if expected is None:
                expected = [r.max_new_tokens for r in requests]
            if len(expected) != len(requests) or not np.all(np.isfinite(np.asarray(expected, np.float64))):
                raise ValueError(f"expected_tokens must be {len(requests)} finite numbers, one a request; got {expected!r:.80}")
            order = sorted(order, key=lambda i: -expected[i])  # stable: ties keep the order of arrival
        self.waiting = list(reversed(order))
        self._key: list[bytes] = []
        self._sharing: dict[bytes, int] = {}
        self.parts: list[Part] = []
        self._place: dict[bytes, tuple[Part, int]] = {}
        self._needless: set[int] = set()
        self._know(self.requests)

    def _know(self, requests: Sequence[Request]) -> None:
        for r in requests:
            # A draft has a row of its own in its prefill; others share their prompt's.
            key = r.prompt.token_ids.tobytes() if r.draft is None else b"draft %d" % len(self._key)
            self._key.append(key)
            self._sharing[key] = self._sharing.get(key, 0) + 1

    def extend(self, requests: Sequence[Request]) -> None:
        """More requests arrive, behind those that wait."""
        first = len(self._key)
        self.requests.extend(requests)
        self._know(requests)
        self.waiting[:0] = reversed(range(first, len(self._key)))

    def skip(self, index: int) -> None:
        """A request needs no row: its draft turned out to be its whole response."""
        self._needless.add(index)

    def restart(self) -> None:
        """Forgets all prefilled prompts: other weights serve from now on."""
        self.parts.clear()
        self._place.clear()

    def forget(self, index: int) -> None:
        """A request has its response; what it asked is not kept."""
        self.requests[index] = None

    def __len__(self) -> int:
        return len(self.waiting)

    def begin_prefill(self, rows: int) -> None:
        """Plans the prefill of what the next `rows` requests lack.

        Prompts of similar length go together, padded to the longest of their part, in buckets. A part has a power of two of
        prompts, so none is computed for nothing and few programs exist.
        """
        wanted: dict[bytes, int] = {}
        for i in reversed(self.waiting[-rows:] if rows else []):
            if self._key[i] not in self._place:
                wanted.setdefault(self._key[i], i)
        for drafted in (False, True):
            indices = [i for i in wanted.values() if (self.requests[i].draft is not None) == drafted]
            self._plan(sorted(indices, key=lambda i: len(self._text(i))), drafted)

    def _text(self, index: int) -> np.ndarray:
        """What has to go through the target before a request can begin: all known tokens but the last."""
        r = self.requests[index]
        ids = r.prompt.token_ids
        return (ids if r.draft is None else np.concatenate([ids, np.asarray(r.draft, np.int32)]))[:-1]

    def _plan(self, indices: list[int], drafted: bool) -> None:
        while indices:
            size = 1 << (min(len(indices), self.config.prefill_batch).bit_length() - 1)
            members, indices = indices[:size], indices[size:]
            texts = [self._text(i) for i in members]
            ids = np.zeros((size, round_up(max(len(texts[-1]), 1), self.config.prefill_bucket)), np.int32)
            for row, text in enumerate(texts):
                ids[row, : len(text)] = text
            part = Part(ids, tuple(self._key[i] for i in members), tuple(members) if drafted else ())
            self.parts.append(part)
            self._place |= {key: (part, row) for row, key in enumerate(part.keys)}

    def next_part(self) -> Part | None:
        """The oldest part that still has to go through the target."""
        return next((p for p in self.parts if not p.ready), None)

    def admissible(self, rows: int) -> list[tuple[Part, list[tuple[int, int]]]]:
        """Takes up to `rows` requests whose prompts are ready off the queue, in order, by part: `(request, row of the part)`.

        A request whose prompt is not ready holds back those behind it, so that the order stays what was asked for.
        """
        by_part: dict[int, tuple[Part, list[tuple[int, int]]]] = {}
        while self.waiting and rows:
            index = self.waiting[-1]
            key = self._key[index]
            part, place = self._place.get(key, (None, 0))
            if part is None or not part.ready:
                break
            self.waiting.pop()
            self._sharing[key] -= 1
            if index in self._needless:
                continue
            rows -= 1
            by_part.setdefault(id(part), (part, []))[1].append((index, place))
        return list(by_part.values())

    def release(self) -> None:
        """Drops prefilled prompts that no waiting request shares."""
        for part in [p for p in self.parts if not any(self._sharing[k] for k in p.keys)]:
            self.parts.remove(part)
            for key in part.keys:
                del self._place[key]


def check(requests: Sequence[Request], vocab_size: int, limit: int) -> None:
    """Refuses what cannot be served, before anything is compiled.

    Args:
        limit: longest prompt + response in tokens.

    Raises:
        ValueError: names the request, the value and what is legal.
    """
    if not requests:
        raise ValueError("requests is empty; generate needs at least one")
    for r in requests:
        name = f"prompt {r.prompt.prompt_id}"
        prompt = len(r.prompt.token_ids)
        if r.max_new_tokens < 1:
            raise ValueError(f"{name}: max_new_tokens={r.max_new_tokens} must be >= 1")
        if prompt >= limit:
            raise ValueError(f"{name} has {prompt} tokens, but prompt and response may have {limit} together")
        if prompt + r.max_new_tokens > limit:
            raise ValueError(
                f"{name} has {prompt} tokens and max_new_tokens={r.max_new_tokens}: {prompt + r.max_new_tokens} exceed the "
                f"{limit} that prompt and response may have together"
            )
        low, high = int(r.prompt.token_ids.min()), int(r.prompt.token_ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"{name} contains the token id {low if low < 0 else high}, outside [0, {vocab_size})")
