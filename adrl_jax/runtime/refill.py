"""Dynamic sampling (DAPO, arXiv 2503.14476, §3.2): prompts are drawn until enough groups can teach something."""

import dataclasses
import logging

import numpy as np

from adrl_jax.runtime.collect import Scored

log = logging.getLogger("adrl_jax")


class RefillError(RuntimeError):
    """After all refills too few groups had unequal rewards."""


def live_groups(scored: Scored) -> list[int]:
    """Group ids whose usable rewards are not all equal, in order."""
    groups = np.array([r.group_id for r in scored.rollouts])
    rewards, usable = scored.rewards, scored.usable
    found = []
    for g in dict.fromkeys(groups.tolist()):
        own = rewards[(groups == g) & usable]
        if own.size and own.max() != own.min():
            found.append(g)
    return found


def select(scored: Scored, groups: list[int]) -> Scored:
    """The part of a batch that belongs to `groups`."""
    wanted = set(groups)
    at = [i for i, r in enumerate(scored.rollouts) if r.group_id in wanted]
    lists = {name: [getattr(scored, name)[i] for i in at] for name in ("rollouts", "prompts", "texts", "scores")}
    return dataclasses.replace(scored, advantages=scored.advantages[at], **lists)


def joined(a: Scored, b: Scored) -> Scored:
    """Two batches in a row; group ids of the second go on after the first's."""
    first = 1 + max(r.group_id for r in a.rollouts)
    moved = [dataclasses.replace(r, group_id=r.group_id + first) for r in b.rollouts]
    return dataclasses.replace(
        a,
        rollouts=[*a.rollouts, *moved],
        prompts=[*a.prompts, *b.prompts],
        texts=[*a.texts, *b.texts],
        scores=[*a.scores, *b.scores],
        advantages=np.concatenate([a.advantages, b.advantages]),
    )


def enough(scored: Scored, wanted: int, refills: int, most: int) -> Scored | None:
    """The first `wanted` live groups of what was drawn so far, or None where another round is due.

    Args:
        scored: all rounds joined.
        wanted: groups of a batch.
        refills: rounds drawn after the first.
        most: refills allowed.

    Raises:
        RefillError: no round is left.
    """
    live = live_groups(scored)
    if len(live) >= wanted:
        return select(scored, live[:wanted])
    if refills >= most:
        total = len(dict.fromkeys(r.group_id for r in scored.rollouts))
        raise RefillError(
            f"{len(live)} of {total} groups have unequal rewards after {refills} refills; a batch needs {wanted}. Raise "
            "learner.max_refills, choose easier or harder prompts, more samples a group, or learner.max_refills=0 to go on without"
        )
    return None
