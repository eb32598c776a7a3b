"""Rollouts of many lengths laid out in rows of one length, with nothing lost and little padding.

Two layouts, equal in loss and gradient:

* `plain`: a segment is the prompt and response of one rollout;
* `prefix_shared`: a segment is one prompt followed by several responses of its group, each of which sees the prompt and
  itself only. The prompt is computed once a segment. A group too long for one row is split and repeats its prompt.

Losses that compare the responses of a group ask for `together`: then no group is split over rows.

Rows are filled first-fit-decreasing (Johnson 1973: at most 11/9 of the best number of rows). Everything here is numpy on
the host; shapes that reach the device are rounded up so that few programs are compiled.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from adrl_jax.types import PackedBatch, Rollout

LAYOUTS = ("prefix_shared", "plain")


@dataclasses.dataclass(frozen=True)
class Segment:
    """One prompt and the responses that follow it in a row.

    Attributes:
        members: indices of rollouts; the first one's prompt is everybody's prompt.
        prompt_length: tokens.
        length: tokens of the prompt and all responses.
        num_targets: response tokens.
    """

    members: tuple[int, ...]
    prompt_length: int
    length: int
    num_targets: int


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of item indices; items in decreasing size (ties by index) go into the first bin with room.

    Raises:
        ValueError: an item is larger than `capacity`.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if sizes[i] > capacity:
            raise ValueError(f"an item of {sizes[i]} tokens does not fit into row_length={capacity}")
        for b, left in enumerate(room):
            if sizes[i] <= left:
                bins[b].append(i)
                room[b] -= sizes[i]
                break
        else:
            bins.append([i])
            room.append(capacity - sizes[i])
    return bins


def segments_of(rollouts: Sequence[Rollout], layout: str, row_length: int, together: bool = False) -> list[Segment]:
    """The segments that `layout` makes of `rollouts`, each at most `row_length` tokens.

    Raises:
        ValueError: unknown `layout`, a rollout (with `together`, a group) longer than a row, or rollouts of one group with
            different prompts.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; choose one of {', '.join(LAYOUTS)}")
    for i, r in enumerate(rollouts):
        if len(r.token_ids) > row_length:
            raise ValueError(
                f"rollout {i} has {len(r.token_ids)} tokens (prompt {r.prompt_length}, response {r.response_length}) and does "
                f"not fit into row_length={row_length}"
            )
    if layout == "plain":
        groups = [[i] for i in range(len(rollouts))]
    else:
        by_group: dict[int, list[int]] = {}
        for i, r in enumerate(rollouts):
            by_group.setdefault(r.group_id, []).append(i)
        groups = list(by_group.values())
    segments = []
    for group in groups:
        first = rollouts[group[0]]
        prompt = first.token_ids[: first.prompt_length]
        for i in group[1:]:
            other = rollouts[i]
            if not np.array_equal(other.token_ids[: other.prompt_length], prompt):
                raise ValueError(f"rollouts {group[0]} and {i} share group_id={first.group_id} but not their prompt")
        sizes = [rollouts[i].response_length for i in group]
        if together and first.prompt_length + sum(sizes) > row_length:
            raise ValueError(_too_long(first.group_id, first.prompt_length + sum(sizes), row_length))
        for part in first_fit_decreasing(sizes, row_length - first.prompt_length):
            # The order of siblings within a segment is the caller's, so that logs read naturally.
            members = tuple(group[k] for k in sorted(part))
            targets = sum(sizes[k] for k in part)
            segments.append(Segment(members, first.prompt_length, first.prompt_length + targets, targets))
    return segments


def _too_long(group: int, tokens: int, row_length: int) -> str:
    return f"group {group} has {tokens} tokens and must stay in one row, but row_length={row_length}"


def plan(rollouts: Sequence[Rollout], layout: str, row_length: int, together: bool = False) -> list[list[Segment]]:
    """Segments assigned to rows, first-fit-decreasing; with `together` the segments of a group side by side in one row."""
    segments = segments_of(rollouts, layout, row_length, together)
    units: dict[int, list[Segment]] = {}
    for number, segment in enumerate(segments):
        units.setdefault(rollouts[segment.members[0]].group_id if together else number, []).append(segment)
    sizes = {key: sum(s.length for s in unit) for key, unit in units.items()}
    for key, size in sizes.items():
        if size > row_length:
            raise ValueError(_too_long(key, size, row_length))
    bins = first_fit_decreasing(list(sizes.values()), row_length)
    keys = list(units)
    return [[segment for k in row for segment in units[keys[k]]] for row in bins]


def round_up(value: int, multiple: int) -> int:
    """The smallest positive multiple of `multiple` that is at least `value`."""
    return max(1, -(-value // multiple)) * multiple


def row_bucket(rows: int, row_multiple: int) -> int:
    """`rows` rounded up to `row_multiple` times 1, 2, 3, 4, 6, 8, 12, 16, … so that few row counts are ever compiled.

    Microbatches that hold only padding are skipped on the device, so the extra rows cost next to nothing.
    """
    units, bucket = max(1, -(-rows // row_multiple)), 1
    while bucket < units:
        bucket = bucket * 3 // 2 if bucket & (bucket - 1) == 0 and bucket > 1 else _next_power(bucket)
    return bucket * row_multiple


def _next_power(value: int) -> int:
    return 1 << value.bit_length()


def pack(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float | np.ndarray],
    *,
    row_length: int,
    layout: str = "prefix_shared",
    row_multiple: int = 1,
    target_multiple: int = 64,
    version: int = 0,
    together: bool = False,
) -> PackedBatch:
    """Packs rollouts into rows.

    Args:
        rollouts: at least one.
        advantages: one a rollout, either a number for all its tokens or float `[R_i]`.
        row_length: T, tokens a row.
        layout: `prefix_shared` or `plain`.
        row_multiple: the number of rows is a bucket of this (devices times microbatch rows).
        target_multiple: the number of targets a row is rounded up to a multiple of this, and is at most T.
        version: the learner's version, for `staleness`.
        together: keep the responses of a group in one row, for losses that compare them.

    Returns:
        `PackedBatch` with numpy leaves.

    Raises:
        ValueError: no rollouts, lengths that disagree, non-finite advantages, or a rollout longer than a row.
    """
    if not rollouts:
        raise ValueError("pack needs at least one rollout")
    if len(advantages) != len(rollouts):
        raise ValueError(f"got {len(advantages)} advantages for {len(rollouts)} rollouts")
    for name, value in (("row_length", row_length), ("row_multiple", row_multiple), ("target_multiple", target_multiple)):
        if value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")
    per_token = [_token_advantages(i, a, r.response_length) for i, (a, r) in enumerate(zip(advantages, rollouts, strict=True))]
    rows = plan(rollouts, layout, row_length, together)
    num_rows = row_bucket(len(rows), row_multiple)
    num_targets = min(row_length, round_up(max(sum(s.num_targets for s in row) for row in rows), target_multiple))
    batch = empty_batch(num_rows, row_length, num_targets)
    groups = {g: i for i, g in enumerate(dict.fromkeys(r.group_id for r in rollouts))}
    for m, row in enumerate(rows):
        at = target_at = 0
        for s, segment in enumerate(row, start=1):
            batch.group_index[m, target_at : target_at + segment.num_targets] = groups[rollouts[segment.members[0]].group_id]
            at, target_at = _write_segment(batch, m, at, target_at, s, segment, rollouts, per_token, version)
    return batch


def _token_advantages(index: int, value, length: int) -> np.ndarray:
    out = np.asarray(value, np.float32)
    if out.ndim == 0:
        out = np.full(length, out)
    if out.shape != (length,):
        raise ValueError(f"advantages[{index}] has shape {out.shape}, expected a number or ({length},)")
    if not np.all(np.isfinite(out)):
        raise ValueError(f"advantages[{index}] is not finite; drop such rollouts before packing")
    return out


def empty_batch(rows: int, row_length: int, num_targets: int) -> PackedBatch:
    """A batch that is all padding: it yields loss 0, denominator 0 and gradient exactly 0."""

    def ints(width):
        return np.zeros((rows, width), np.int32)

    def floats():
        return np.zeros((rows, num_targets), np.float32)

    t, u = row_length, num_targets
    return PackedBatch(
        token_ids=ints(t),
        positions=ints(t),
        segment_ids=ints(t),
        branch_ids=ints(t),
        source_index=ints(u),
        target_index=ints(u),
        target_ids=ints(u),
        target_mask=np.zeros((rows, u), bool),
        log_probs=floats(),
        advantages=floats(),
        rollout_index=ints(u),
        staleness=ints(u),
        group_index=ints(u),
    )


def _write_segment(batch, row, at, target_at, number, segment, rollouts, advantages, version):
    p = segment.prompt_length
    first = rollouts[segment.members[0]]
    where = slice(at, at + p)
    batch.token_ids[row, where] = first.token_ids[:p]
    batch.positions[row, where] = np.arange(p)
    batch.segment_ids[row, where] = number
    last_prompt = at + p - 1
    at += p
    for branch, i in enumerate(segment.members, start=1):
        rollout, r = rollouts[i], rollouts[i].response_length
        where, targets = slice(at, at + r), slice(target_at, target_at + r)
        batch.token_ids[row, where] = rollout.response_ids
        batch.positions[row, where] = np.arange(p, p + r)
        batch.segment_ids[row, where] = number
        batch.branch_ids[row, where] = branch
        batch.source_index[row, targets] = np.concatenate([[last_prompt], np.arange(at, at + r - 1)])
        batch.target_index[row, targets] = np.arange(at, at + r)
        batch.target_ids[row, targets] = rollout.response_ids
        batch.target_mask[row, targets] = True
        batch.log_probs[row, targets] = rollout.log_probs
        batch.advantages[row, targets] = advantages[i]
        batch.rollout_index[row, targets] = i
        batch.staleness[row, targets] = version - rollout.policy_versions
        at, target_at = at + r, target_at + r
    return at, target_at


def unpack_targets(batch: PackedBatch, values: np.ndarray, num_rollouts: int) -> list[np.ndarray]:
    """The target values `[M, U]` of a batch as one array `[R_i]` a rollout, in the order they were packed in."""
    mask, owner, values = np.asarray(batch.target_mask), np.asarray(batch.rollout_index), np.asarray(values)
    owner, values = owner[mask], values[mask]
    return [values[owner == i] for i in range(num_rollouts)]


def scatter_targets(batch: PackedBatch, values: Sequence[np.ndarray], dtype=np.float32) -> np.ndarray:
    """The inverse of `unpack_targets`: one array `[R_i]` a rollout, laid out like the batch's targets, `[M, U]`, 0 at padding.

    Raises:
        ValueError: a length disagrees with the batch.
    """
    mask, owner = np.asarray(batch.target_mask), np.asarray(batch.rollout_index)
    out = np.zeros(mask.shape, dtype)
    for i, value in enumerate(values):
        where = mask & (owner == i)
        if len(value) != where.sum():
            raise ValueError(f"values[{i}] has length {len(value)}, the batch holds {where.sum()} targets of rollout {i}")
        out[where] = value
    return out


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds of an update: `fixed + per_row * M + per_token * M * T + per_target * M * U + per_pair * M * T * T`.

    Only ratios matter to `choose_row_length`. The defaults count floating-point operations of a model with
    `width` hidden units a layer; `fit_cost_model` replaces them by measured ones.
    """

    per_token: float = 1.0
    per_target: float = 0.0
    per_pair: float = 0.0
    per_row: float = 0.0
    fixed: float = 0.0

    def seconds(self, rows: int, row_length: int, targets: int) -> float:
        tokens = rows * row_length
        return (
            self.fixed
            + self.per_row * rows
            + self.per_token * tokens
            + self.per_target * rows * targets
            + self.per_pair * tokens * row_length
        )


def fit_cost_model(samples: Iterable[tuple[int, int, int, float]]) -> CostModel:
    """Least squares with non-negative coefficients over measured `(rows, row_length, targets, seconds)`.

    Raises:
        ValueError: fewer than two samples.
    """
    table = np.array(list(samples), np.float64)
    if table.ndim != 2 or len(table) < 2:
        raise ValueError(f"fit_cost_model needs at least two samples, got {len(table)}")
    m, t, u, seconds = table.T
    columns = np.stack([m * t, m * u, m * t * t, m, np.ones_like(m)], axis=1)
    active = list(range(columns.shape[1]))
    # Few samples and five terms: drop whatever the fit makes negative, most negative first, until none is.
    while True:
        scale = np.abs(columns[:, active]).max(axis=0)
        coef = np.linalg.lstsq(columns[:, active] / scale, seconds, rcond=None)[0] / scale
        if coef.min() >= 0 or len(active) == 1:
            break
        active.pop(int(np.argmin(coef * scale)))
    full = np.zeros(columns.shape[1])
    full[active] = np.maximum(coef, 0)
    return CostModel(*map(float, full))


def longest_unit(rollouts: Sequence[Rollout], layout: str, together: bool) -> int:
    """Tokens of the longest thing that must fit into one row: a rollout, or with `together` a group."""
    if not together:
        return max(len(r.token_ids) for r in rollouts)
    sizes: dict[int, int] = {}
    for r in rollouts:
        fresh = r.prompt_length if layout == "plain" or r.group_id not in sizes else 0
        sizes[r.group_id] = sizes.get(r.group_id, 0) + fresh + r.response_length
    return max(sizes.values())


def choose_row_length(
    rollouts: Sequence[Rollout],
    candidates: Sequence[int],
    cost: CostModel,
    *,
    layout: str = "prefix_shared",
    row_multiple: int = 1,
    target_multiple: int = 64,
    together: bool = False,
) -> int:
    """The candidate row length whose packing costs least; ties go to the shorter row.

    Long rows pad less, repeat fewer prompts and cost more attention; which wins is a matter of measurement.

    Raises:
        ValueError: no candidate is as long as the longest rollout.
    """
    longest = longest_unit(rollouts, layout, together)
    fitting = sorted(c for c in candidates if c >= longest)
    if not fitting:
        what = "group" if together else "rollout"
        raise ValueError(f"row lengths {tuple(candidates)} are all shorter than the longest {what} ({longest} tokens)")

    def seconds(row_length):
        rows = plan(rollouts, layout, row_length, together)
        targets = min(row_length, round_up(max(sum(s.num_targets for s in row) for row in rows), target_multiple))
        return cost.seconds(round_up(len(rows), row_multiple), row_length, targets)

    return min(fitting, key=lambda c: (seconds(c), c))
