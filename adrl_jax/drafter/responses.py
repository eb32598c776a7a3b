"""Responses on disk, so that trying another training setting does not generate them anew: one `.npz` of rollouts, with a key that
says what they were made from."""

import json
import os
import pathlib
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from adrl_jax.types import FinishReason, Rollout, SamplingParams

_SCALARS = ("prompt_id", "visit", "sample", "group_id", "prompt_length", "response_length")


def save(path: str | os.PathLike, rollouts: Sequence[Rollout], key: Any) -> None:
    """Writes rollouts, whole or not at all.

    Args:
        key: what they depend on, JSON's types.
    """
    path = pathlib.Path(path)
    arrays = {name: np.array([getattr(r, name) for r in rollouts], np.int64) for name in _SCALARS}
    arrays["finish_reason"] = np.array([int(r.finish_reason) for r in rollouts], np.int32)
    laws = [(r.sampling.temperature, r.sampling.top_k, r.sampling.top_p, r.sampling.min_p) for r in rollouts]
    arrays["sampling"] = np.array(laws, np.float64).reshape(-1, 4)
    for name in ("token_ids", "log_probs", "policy_versions"):
        arrays[name] = np.concatenate([getattr(r, name) for r in rollouts])
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez(file, key=np.array(_text(key)), **arrays)
    part.replace(path)


def load(path: str | os.PathLike, key: Any) -> list[Rollout] | None:
    """The rollouts of an earlier `save`; None where there are none, or where they were made from something else.

    Raises:
        ValueError: the file is damaged.
    """
    if not pathlib.Path(path).is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
        if str(found["key"]) != _text(key):
            return None
        return _rollouts(found)
    except (KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{os.fspath(path)}: damaged, or not what save wrote ({error}); remove it") from error


def _rollouts(found: dict[str, np.ndarray]) -> list[Rollout]:
    rollouts, at, answered = [], 0, 0
    for i, reason in enumerate(found["finish_reason"]):
        facts = {name: int(found[name][i]) for name in _SCALARS}
        tokens, response = facts["prompt_length"] + facts["response_length"], facts["response_length"]
        temperature, top_k, top_p, min_p = found["sampling"][i].tolist()
        rollouts.append(
            Rollout(
                **facts,
                token_ids=found["token_ids"][at : at + tokens],
                log_probs=found["log_probs"][answered : answered + response],
                policy_versions=found["policy_versions"][answered : answered + response],
                finish_reason=FinishReason(int(reason)),
                sampling=SamplingParams(temperature, int(top_k), top_p, min_p),
            )
        )
        at, answered = at + tokens, answered + response
    return rollouts


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True)
