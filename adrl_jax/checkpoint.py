"""Everything that changes during a run, saved as one Orbax tree, and found again after any kind of end.

A checkpoint of step `n` has two items: `state`, a nested dict of named arrays, and `host`, a JSON record (the identity of
the run, counters, log lengths); where work was under way also `work`, arrays of whatever shapes. The state is written from a private host copy, so that the learner may donate its buffers
while the save is still going on, and it is read back against a template: names, shapes and dtypes must agree exactly.
"""

import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

_TEMPORARY = re.compile(r"\d+\.orbax-checkpoint-tmp")
_MAX_LISTED = 4

log = logging.getLogger("adrl_jax")


class CheckpointMismatch(ValueError):
    """A checkpoint exists but belongs to something else."""


def named_arrays(tree: Any) -> dict[str, Any]:
    """Leaves of any pytree by path, e.g. `learner/params/layer_0/attn/qkv/kernel`. Empty subtrees and None vanish."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(_key_name(k) for k in path): leaf for path, leaf in leaves}


def _key_name(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"unknown pytree key {key!r}")


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        node = nested
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return nested


class Checkpointer:
    """Saves and restores steps below one directory.

    Only one process may use a directory at a time; what an earlier, killed one left half-written is put aside here.

    Args:
        directory: made when it does not exist.
        keep: how many of the latest steps stay, >= 1.
    """

    def __init__(self, directory: str | Path, *, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep={keep!r} must be >= 1")
        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._put_incomplete_aside()
        # Orbax reports every step of a save at INFO and WARNING; what matters to a user is logged here.
        logging.getLogger("absl").addFilter(_quiet_orbax)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep), enable_async_checkpointing=True
        )
        # Handlers by name: without them a manager cannot tell what a step holds before it has saved one itself.
        handlers = {
            "state": ocp.StandardCheckpointHandler(),
            "host": ocp.JsonCheckpointHandler(),
            "work": ocp.StandardCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)
        self._last_saved = self.latest()

    def steps(self) -> list[int]:
        """Committed steps, ascending; a step still being written is not among them."""
        return sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdigit() and _complete(p))

    def latest(self) -> int | None:
        steps = self.steps()
        return steps[-1] if steps else None

    def save(self, step: int, state: Any, host: Mapping[str, Any], work: Mapping[str, np.ndarray] | None = None) -> None:
        """Starts writing `state` (pytree of arrays), `host` (JSON) and `work` (flat dict of arrays, not empty ones) as `step`;
        returns once all are copied.

        Saving a step that this directory already has is a no-op, so that "save at the end" needs no bookkeeping.

        Raises:
            ValueError: `step` is older than the latest one.
            RuntimeError: Orbax declined, or an earlier save failed in the background.
        """
        if self._last_saved is not None and step <= self._last_saved:
            if step == self._last_saved:
                return
            raise ValueError(f"step={step} is older than the latest checkpoint, {self._last_saved}")
        self.wait()
        # np.asarray of a CPU array is a view of the very buffer that the next update gives away; hence the copy.
        copies = {name: np.array(leaf, copy=True) for name, leaf in named_arrays(state).items()}
        record = json.loads(json.dumps(host))
        items: dict[str, Any] = {"state": ocp.args.StandardSave(_nest(copies)), "host": ocp.args.JsonSave(record)}
        if work:
            items["work"] = ocp.args.StandardSave({name: np.array(x, copy=True) for name, x in work.items()})
        saved = self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        if not saved:
            raise RuntimeError(f"Orbax declined to save step {step} in {self.directory}")
        self._last_saved = step

    def host(self, step: int) -> dict[str, Any]:
        """The JSON record of a committed step."""
        return self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]

    def work(self, step: int) -> dict[str, np.ndarray]:
        """The work under way that a committed step was saved with; empty where there was none."""
        if not (self.directory / str(step) / "work").is_dir():
            return {}
        stored = self._manager.item_metadata(step)["work"].tree
        blank = {name: np.zeros(x.shape, x.dtype) for name, x in named_arrays(stored).items()}
        found = self._manager.restore(step, args=ocp.args.Composite(work=ocp.args.StandardRestore(blank)))["work"]
        return {name: np.asarray(x) for name, x in found.items()}

    def restore(self, step: int, template: Any, renew: Sequence[str] = ()) -> Any:
        """The state of a committed step, in the types, dtypes and placement of `template`.

        Arrays go to where the template's arrays live, however many devices the saving process had.

        Args:
            renew: first names of what is not restored: it stays as it is in `template`, whatever the checkpoint holds.

        Raises:
            CheckpointMismatch: a name, shape or dtype differs; the message lists the first few.
        """
        expected = named_arrays(template)
        stored = named_arrays(self._manager.item_metadata(step)["state"].tree)

        def kept(names: Mapping[str, Any]) -> dict[str, Any]:
            return {name: x for name, x in names.items() if name.split("/")[0] not in renew}

        self._check(step, kept(expected), kept(stored))
        blank = {name: np.zeros(x.shape, x.dtype) for name, x in stored.items()}
        nested = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(_nest(blank))))["state"]
        values = named_arrays(nested)
        leaves, treedef = jax.tree_util.tree_flatten(template)
        return jax.tree_util.tree_unflatten(
            treedef, [_place(values[n], x) if n in kept(expected) else x for n, x in zip(expected, leaves)]
        )

    def wait(self) -> None:
        """Blocks until nothing is being written; raises what went wrong in the background."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def close(self) -> None:
        self.wait()
        self._manager.close()

    def _check(self, step: int, expected: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        faults = [f"{n}: missing in the checkpoint" for n in expected if n not in stored]
        faults += [f"{n}: only in the checkpoint" for n in stored if n not in expected]
        for name in expected.keys() & stored.keys():
            want, have = expected[name], stored[name]
            if tuple(want.shape) != tuple(have.shape) or np.dtype(want.dtype) != np.dtype(have.dtype):
                faults.append(
                    f"{name}: checkpoint {np.dtype(have.dtype)}{list(have.shape)}, "
                    f"this run {np.dtype(want.dtype)}{list(want.shape)}"
                )
        if faults:
            listed = "\n  ".join(sorted(faults)[:_MAX_LISTED])
            more = f"\n  … and {len(faults) - _MAX_LISTED} more" if len(faults) > _MAX_LISTED else ""
            raise CheckpointMismatch(
                f"checkpoint {self.directory / str(step)} is of another model or setting:\n  {listed}{more}"
            )

    def _put_incomplete_aside(self) -> None:
        for path in sorted(self.directory.iterdir()):
            if _TEMPORARY.match(path.name):
                log.warning("removing the unfinished checkpoint %s", path.name)
                shutil.rmtree(path)
            elif path.name.isdigit() and not _complete(path):
                aside = path.with_name(f"{path.name}.incomplete")
                log.warning("%s is not a complete checkpoint; moved to %s", path, aside.name)
                if aside.exists():
                    shutil.rmtree(aside)
                path.rename(aside)


def check_identity(stored: Mapping[str, Any], current: Mapping[str, Any], where: str) -> None:
    """Compares flat records of what a checkpoint belongs to (model sizes, tokenizer, task, seed).

    Raises:
        CheckpointMismatch: names each field that differs with both values.
    """
    keys = [k for k in sorted(stored.keys() | current.keys()) if stored.get(k) != current.get(k)]
    if keys:
        lines = "\n  ".join(f"{k}: checkpoint {stored.get(k)!r}, this run {current.get(k)!r}" for k in keys)
        raise CheckpointMismatch(
            f"{where} belongs to another run; choose another workdir, or the settings it was made with:\n  {lines}"
        )


def _complete(path: Path) -> bool:
    """Orbax renames a step's folder into place last, after these files; a folder without them is not a checkpoint."""
    return all((path / name).is_file() for name in ("_CHECKPOINT_METADATA", "state/_METADATA", "host/metadata"))


def _place(value: np.ndarray, like: Any) -> Any:
    return jax.device_put(value, like.sharding) if isinstance(like, jax.Array) else np.asarray(value)


def _quiet_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname or record.levelno >= logging.ERROR
