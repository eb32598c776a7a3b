"""Rollouts that nobody learnt from yet, as arrays and JSON: what a checkpoint keeps of work under way."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adrl_jax.rollout.stats import LaunchRecord
from adrl_jax.types import FinishReason, Rollout, SamplingParams

_FACTS = ("prompt_id", "visit", "sample", "group_id", "prompt_length", "response_length", "accept_passes", "accept_tokens")


def to_arrays(finished: Mapping[int, Sequence[Rollout]]) -> dict[str, np.ndarray]:
    """Groups of rollouts by number as a few flat arrays; empty where there are none."""
    rollouts = [(number, r) for number in sorted(finished) for r in finished[number]]
    if not rollouts:
        return {}
    facts = [
        [n, *(getattr(r, name) for name in _FACTS), int(r.finish_reason), -1 if r.noise_visit is None else r.noise_visit]
        for n, r in rollouts
    ]
    return {
        "facts": np.array(facts, np.int64),
        "sampling": np.array([dataclasses.astuple(r.sampling) for _, r in rollouts], np.float64),
        "token_ids": np.concatenate([r.token_ids for _, r in rollouts]).astype(np.int32),
        "log_probs": np.concatenate([r.log_probs for _, r in rollouts]).astype(np.float32),
        "policy_versions": np.concatenate([r.policy_versions for _, r in rollouts]).astype(np.int32),
    }


def from_arrays(arrays: Mapping[str, np.ndarray]) -> dict[int, list[Rollout]]:
    """What `to_arrays` was given, bit for bit."""
    out: dict[int, list[Rollout]] = {}
    if not arrays:
        return out
    tokens = spoken = 0
    for row, law in zip(arrays["facts"].tolist(), arrays["sampling"].tolist()):
        number, *values, reason, noise_visit = row
        facts = dict(zip(_FACTS, values, strict=True))
        length, response = facts["prompt_length"] + facts["response_length"], facts["response_length"]
        temperature, top_k, top_p, min_p = law
        rollout = Rollout(
            **facts,
            token_ids=arrays["token_ids"][tokens : tokens + length].copy(),
            log_probs=arrays["log_probs"][spoken : spoken + response].copy(),
            policy_versions=arrays["policy_versions"][spoken : spoken + response].copy(),
            finish_reason=FinishReason(reason),
            sampling=SamplingParams(temperature, int(top_k), top_p, min_p),
            noise_visit=None if noise_visit < 0 else noise_visit,
        )
        out.setdefault(number, []).append(rollout)
        tokens, spoken = tokens + length, spoken + response
    return out


def launches_to_json(launches: Mapping[int, Sequence[LaunchRecord]]) -> dict[str, list[dict[str, Any]]]:
    """Launches by step."""
    return {str(step): [dataclasses.asdict(x) for x in found] for step, found in launches.items()}


def launches_from_json(record: Mapping[str, Any]) -> dict[int, tuple[LaunchRecord, ...]]:
    """What `launches_to_json` was given."""

    def launch(fields: dict[str, Any]) -> LaunchRecord:
        return LaunchRecord(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})

    return {int(step): tuple(launch(x) for x in found) for step, found in record.items()}
