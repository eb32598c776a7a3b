"""What was answered to each prompt before, on the host: the texts from which rows get their references (see `history`).

Memory is bounded by limits given at construction; over a limit the oldest texts go. The store is part of a run's state: its
`state_dict` has fixed names, shapes and dtypes, and a restored store gives the same references from then on.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from adrl_jax.speculation.history import SEPARATOR, UNALIGNED
from adrl_jax.types import Rollout


class References(NamedTuple):
    """What `with_references` of a drafter takes, for `B` rows; for a single prompt without the leading `B`.

    Attributes:
        token_ids: int32 `[B, R]`, texts with `SEPARATOR` between them, the most recent last; `SEPARATOR` where unfilled.
        length: int32 `[B]`, how much is filled.
        offset: int32 `[B]`: `token_ids[b, offset[b] + t]` is the earlier text's token at absolute position t, see
            `HistoryState.offset`.
    """

    token_ids: np.ndarray
    length: np.ndarray
    offset: np.ndarray


class _Text(NamedTuple):
    """One response with the end of its prompt; `start` is the absolute position of its first token."""

    token_ids: np.ndarray
    start: int


_Name = tuple[int, int, int]  # prompt_id, visit, sample


class HistoryStore:
    """Responses by prompt, the last `context` tokens of the prompt before each, so that its first tokens are found too.

    A response that is added again under the same (prompt_id, visit, sample) replaces the earlier one: it continues or renews it.

    Args:
        max_tokens: stored tokens altogether; a longer text keeps its end.
        max_texts: stored responses altogether.
        max_responses: stored responses of one prompt.
        context: prompt tokens kept before each response; a drafter's `max_ngram` lets first tokens match in full length.

    Raises:
        ValueError: a limit is not an integer >= 1 (`context`: >= 0).
    """

    def __init__(self, *, max_tokens: int = 1 << 22, max_texts: int = 1 << 14, max_responses: int = 16, context: int = 8):
        limits = dict(max_tokens=max_tokens, max_texts=max_texts, max_responses=max_responses, context=context)
        for name, value in limits.items():
            least = 0 if name == "context" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"HistoryStore.{name}={value!r} must be an integer >= {least}")
        self.max_tokens, self.max_texts, self.max_responses, self.context = max_tokens, max_texts, max_responses, context
        self._clear()

    def _clear(self) -> None:
        self._texts: OrderedDict[_Name, _Text] = OrderedDict()  # by age, the oldest first
        self._of_prompt: dict[int, OrderedDict[_Name, None]] = {}  # by age, too
        self._tokens = 0

    def __len__(self) -> int:
        """Stored responses."""
        return len(self._texts)

    @property
    def tokens(self) -> int:
        """Stored tokens, prompt contexts included."""
        return self._tokens

    def add(self, rollout: Rollout) -> None:
        """Stores a response as the most recent one, in place of older ones where a limit is reached.

        Raises:
            ValueError: a token id is negative.
        """
        start = max(rollout.prompt_length - self.context, 0)
        ids = np.array(rollout.token_ids[start:], np.int32)
        if ids.min() < 0:
            raise ValueError(f"Rollout.token_ids contains {ids.min()}, must be >= 0 (prompt_id={rollout.prompt_id})")
        cut = max(len(ids) - self.max_tokens, 0)
        self._put((int(rollout.prompt_id), int(rollout.visit), int(rollout.sample)), _Text(ids[cut:], start + cut))

    def _put(self, name: _Name, text: _Text) -> None:
        if name in self._texts:
            self._drop(name)
        self._texts[name] = text
        own = self._of_prompt.setdefault(name[0], OrderedDict())
        own[name] = None
        self._tokens += len(text.token_ids)
        if len(own) > self.max_responses:
            self._drop(next(iter(own)))
        while self._tokens > self.max_tokens or len(self._texts) > self.max_texts:
            self._drop(next(iter(self._texts)))

    def _drop(self, name: _Name) -> None:
        self._tokens -= len(self._texts.pop(name).token_ids)
        own = self._of_prompt[name[0]]
        del own[name]
        if not own:
            del self._of_prompt[name[0]]

    def reference(self, prompt_id: int, capacity: int, sample: int | None = None) -> References:
        """The last `capacity` tokens of all texts of a prompt, by age, the most recent last.

        Args:
            sample: for drafting position by position: the most recent text of this sample goes last, whatever its age, and
                `offset` points at it.

        Raises:
            ValueError: `capacity` is less than 1.
        """
        if capacity < 1:
            raise ValueError(f"capacity={capacity!r} must be >= 1")
        names = list(self._of_prompt.get(prompt_id, ()))
        aligned = [name for name in names if name[2] == sample][-1:]
        names = [name for name in names if name not in aligned] + aligned
        ids, end = np.full(capacity, SEPARATOR, np.int32), capacity
        for name in reversed(names):  # filled from the end, then moved to the front
            text = self._texts[name].token_ids
            kept = text[max(len(text) - end, 0) :]
            ids[end - len(kept) : end] = kept
            end -= len(kept) + 1
            if end <= 0:
                break
        first = max(end + 1, 0) if names else capacity
        length = capacity - first
        ids = np.concatenate([ids[first:], np.full(first, SEPARATOR, np.int32)])
        offset = UNALIGNED
        if aligned:
            last = self._texts[aligned[0]]
            offset = length - len(last.token_ids) - last.start
        return References(ids, np.int32(length), np.int32(offset))

    def references(self, prompt_ids: Sequence[int], capacity: int, samples: Sequence[int] | None = None) -> References:
        """`reference` of several rows, stacked."""
        samples = [None] * len(prompt_ids) if samples is None else samples
        known: dict[Any, References] = {}
        for row in zip(prompt_ids, samples, strict=True):
            if row not in known:
                known[row] = self.reference(row[0], capacity, row[1])
        rows = [known[row] for row in zip(prompt_ids, samples)]
        if not rows:
            return References(np.zeros((0, capacity), np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32))
        return References(*(np.stack(x) for x in zip(*rows)))

    # As part of a run's state.

    def state_dict(self) -> dict[str, np.ndarray]:
        """Everything stored, by age; shapes and dtypes depend on `max_tokens` and `max_texts` only.

        `token_ids` int32 `[max_tokens]` holds all texts, one after the other; `prompt_id`, `visit`, `sample` uint64
        `[max_texts]` and `start`, `size` int32 `[max_texts]` tell which is which; `count` int32 `[]` is their number.
        """
        state = self._blank()
        sizes = [len(text.token_ids) for text in self._texts.values()]
        n = len(sizes)
        state["count"] = np.array(n, np.int32)
        if n:
            state["token_ids"][: self._tokens] = np.concatenate([text.token_ids for text in self._texts.values()])
            state["size"][:n] = sizes
            state["start"][:n] = [text.start for text in self._texts.values()]
            for column, field in enumerate(("prompt_id", "visit", "sample")):
                state[field][:n] = np.array([name[column] for name in self._texts], np.uint64)
        return state

    def _blank(self) -> dict[str, np.ndarray]:
        return {
            "count": np.zeros((), np.int32),
            "token_ids": np.zeros(self.max_tokens, np.int32),
            "size": np.zeros(self.max_texts, np.int32),
            "start": np.zeros(self.max_texts, np.int32),
            **{field: np.zeros(self.max_texts, np.uint64) for field in ("prompt_id", "visit", "sample")},
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Becomes the store that `state_dict` was taken of; what was stored here is gone. `max_responses` may differ.

        Raises:
            ValueError: a name, shape or dtype is not this store's, or sizes do not add up. Nothing has changed then.
        """
        blank = self._blank()
        if set(state) != set(blank):
            raise ValueError(
                f"a history store's state has {', '.join(sorted(blank))}; got {', '.join(sorted(state)) or 'nothing'}"
            )
        arrays = {name: np.asarray(state[name]) for name in blank}
        for name, expected in blank.items():
            got = arrays[name]
            if (got.shape, got.dtype) != (expected.shape, expected.dtype):
                raise ValueError(
                    f"history store: {name} is {got.dtype}{list(got.shape)}, expected {expected.dtype}{list(expected.shape)} "
                    f"(max_tokens={self.max_tokens}, max_texts={self.max_texts})"
                )
        count = int(arrays["count"])
        if not 0 <= count <= self.max_texts:
            raise ValueError(f"history store: count={count} must be in [0, max_texts={self.max_texts}]")
        sizes = arrays["size"][:count]
        if count and (sizes.min() < 1 or sizes.sum(dtype=np.int64) > self.max_tokens):
            raise ValueError(
                f"history store: sizes of at least {sizes.min()} with the sum {sizes.sum(dtype=np.int64)} do not fit "
                f"max_tokens={self.max_tokens}"
            )
        self._clear()
        ends = np.cumsum(sizes)
        names = zip(*(arrays[field][:count].tolist() for field in ("prompt_id", "visit", "sample")))
        for name, start, begin, end in zip(names, arrays["start"][:count].tolist(), ends - sizes, ends):
            self._put(name, _Text(arrays["token_ids"][begin:end].copy(), start))
