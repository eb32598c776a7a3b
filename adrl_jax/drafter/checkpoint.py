"""A trained drafter on disk: a folder with `drafter.safetensors` (what is trained, and the map of draft ids) and
`drafter.json` (whose drafter it is, and what its training was). Nothing of the target is written."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from adrl_jax.checkpoint import named_arrays
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.safetensors_file import read_json
from adrl_jax.speculation.eagle import DRAFT_HEAD, DRAFT_IDS, Eagle
from adrl_jax.speculation.eagle3 import Eagle3

WEIGHTS, RECORD = "drafter.safetensors", "drafter.json"
FORMAT = 1

# Everything about the target but the precision it is served in, and what is kept of a pass.
_TARGET_FIELDS = tuple(f.name for f in dataclasses.fields(ModelConfig) if f.name not in ("dtype", "taps"))
KINDS: dict[str, type[Eagle]] = {"eagle": Eagle, "eagle3": Eagle3}


def save(
    folder: str | os.PathLike,
    drafter: Eagle,
    params: Any,
    *,
    target_fingerprint: str,
    record: Mapping[str, Any] | None = None,
) -> None:
    """Writes `folder`; `drafter.json` comes last, so a folder that has it is complete.

    Args:
        params: the drafter's, as they are trained; a served `draft_head` is the target's and is left out.
        target_fingerprint: of the policy's weights it was trained on.
        record: further facts, JSON's types only, under names of their own.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).unlink(missing_ok=True)
    flat = {name: np.ascontiguousarray(value) for name, value in named_arrays(params).items() if name != DRAFT_HEAD}
    safetensors.numpy.save_file(flat, str(folder / WEIGHTS), metadata={"format": "np"})
    facts = {
        "format": FORMAT,
        "drafter": drafter.name,
        "draft_vocab_size": drafter.draft_vocab_size,
        "target_fingerprint": target_fingerprint,
        "target": {name: _plain(getattr(drafter.config, name)) for name in _TARGET_FIELDS},
        **(record or {}),
    }
    text = json.dumps(facts, indent=2, allow_nan=False)
    part = folder / f"{RECORD}.part"
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(folder / RECORD)


def load(
    folder: str | os.PathLike, config: ModelConfig, target_fingerprint: str | None = None
) -> tuple[Eagle, Any, dict[str, Any]]:
    """The drafter, its parameters (float32) and its record.

    Args:
        config: of the target that it shall draft for.
        target_fingerprint: of that target's weights; None accepts a drafter trained on other weights of the same sizes, as is
            right once the policy has moved.

    Raises:
        FileNotFoundError: no drafter in `folder`.
        ValueError: a damaged or foreign file; the drafter is of another target (the field is named, with both values); its
            weights have other shapes, or its draft ids are not distinct ids of the target, ascending.
    """
    folder = pathlib.Path(folder)
    for name in (RECORD, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: absent; experiments.drafter_warmup writes {RECORD} and {WEIGHTS}")
    facts = read_json(folder / RECORD)
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        found = facts.get("format") if isinstance(facts, dict) else None
        raise ValueError(f"{folder / RECORD}: format={found!r} is not {FORMAT}, the one this version reads")
    if facts.get("drafter") not in KINDS:
        raise ValueError(f"{folder / RECORD}: drafter={facts.get('drafter')!r} is unknown; choose one of {', '.join(KINDS)}")
    _check_target(folder, facts, config, target_fingerprint)
    try:
        drafter = KINDS[facts["drafter"]](config, draft_vocab_size=facts.get("draft_vocab_size"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / RECORD}: {error}") from None
    return drafter, _read_weights(folder / WEIGHTS, drafter), facts


def _check_target(folder: pathlib.Path, facts: Mapping[str, Any], config: ModelConfig, fingerprint: str | None) -> None:
    target = facts.get("target")
    if not isinstance(target, Mapping):
        raise ValueError(f"{folder / RECORD}: target={target!r} must be the sizes of the model it drafts for")
    for name in _TARGET_FIELDS:
        mine = _plain(getattr(config, name))
        if name not in target or target[name] != mine:
            raise ValueError(
                f"{folder}: this drafter is of another target: target.{name}={target.get(name)!r}, the model here has {mine!r}"
            )
    if fingerprint is not None and facts.get("target_fingerprint") != fingerprint:
        raise ValueError(
            f"{folder}: this drafter is of another target: target_fingerprint={facts.get('target_fingerprint')!r}, "
            f"the weights here have {fingerprint!r}"
        )


def _read_weights(path: pathlib.Path, drafter: Eagle) -> Any:
    try:
        found = safetensors.numpy.load_file(str(path))
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: damaged or not a safetensors file: {error}") from error
    shapes = jax.eval_shape(drafter.init_params, jax.random.key(0))
    wanted = {name: (x.shape, np.dtype(x.dtype)) for name, x in named_arrays(shapes).items()}
    if missing := sorted(wanted.keys() - found.keys()):
        raise ValueError(f"{path}: lacks the tensor {missing[0]!r}")
    if extra := sorted(found.keys() - wanted.keys()):
        raise ValueError(f"{path}: holds the tensor {extra[0]!r}, which this drafter does not have")
    for name, (shape, dtype) in wanted.items():
        if found[name].shape != shape or found[name].dtype != dtype:
            raise ValueError(f"{path}: {name} is {found[name].dtype} {found[name].shape}, expected {dtype} {shape}")
    ids = found.get(DRAFT_IDS)
    if ids is not None and (np.any(np.diff(ids) <= 0) or ids[0] < 0 or ids[-1] >= drafter.config.vocab_size):
        raise ValueError(f"{path}: {DRAFT_IDS} must be distinct ids in [0, {drafter.config.vocab_size}), ascending")
    tree: dict[str, Any] = {}
    for name, value in found.items():
        node = tree
        *path_to, last = name.split("/")
        for key in path_to:
            node = node.setdefault(key, {})
        node[last] = jnp.asarray(value)
    return tree


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
