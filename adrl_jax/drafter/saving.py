"""Saves of the drafter alone while training goes on: what is trained and nothing else, written in the background, whole or not at all.

Embedding and vocabulary projection are the target's and frozen; they are most of a drafter's bytes and never written. The caller
does not even wait for a copy of the rest: one is asked of the device, which makes it before the next update may take the buffers
over, and all else happens in the background. A save is a folder `<root>/<version>` as `checkpoint` reads it, with the optimizer's
state beside it; it is written under another name and renamed last, so whatever ends the process, a folder with a number for its
name is complete.
"""

import os
import pathlib
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from adrl_jax.checkpoint import named_arrays
from adrl_jax.drafter import checkpoint
from adrl_jax.speculation import eagle
from adrl_jax.speculation.eagle import Eagle

OPTIMIZER = "optimizer.safetensors"
_PART = re.compile(r"\.\d+\.part")


class DrafterSaver:
    """Saves below one folder; one at a time.

    Args:
        root: made with the first save. What an earlier process left unfinished there is removed.
        drafter: whose parameters are saved.
        keep: how many of the latest saves stay, >= 1.
    """

    def __init__(self, root: str | os.PathLike, drafter: Eagle, *, keep: int = 2):
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"DrafterSaver.keep={keep!r} must be a positive integer")
        self.root, self.drafter, self.keep = pathlib.Path(root), drafter, keep
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None
        if self.root.is_dir():
            for path in self.root.iterdir():
                if _PART.fullmatch(path.name):
                    shutil.rmtree(path)

    def save(
        self,
        version: int,
        params: Any,
        opt_state: Any,
        *,
        target_fingerprint: str | Callable[[], str],
        record: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts writing and returns at once: what is given may be donated to the next update. A version that is there already is
        left as it is.

        Args:
            params: the drafter's; its map of draft ids is saved, what it serves of the target is not.
            opt_state: any pytree of arrays.
            target_fingerprint: as in `checkpoint.save`, or what tells it in the background.
            record: as in `checkpoint.save`.

        Raises:
            what went wrong with the save before.
        """
        self.wait()
        if (self.root / str(version)).exists():
            return
        trained, fixed = eagle.split(params)
        copies = device_copies(({**trained, **fixed}, named_arrays(opt_state)))

        def write() -> None:
            try:
                params, moments = jax.device_get(copies)
                found = target_fingerprint if isinstance(target_fingerprint, str) else target_fingerprint()
                self._write(int(version), params, moments, found, record)
            except BaseException as error:
                self._fault = error

        # Not a daemon: a process that ends lets it finish.
        self._thread = threading.Thread(target=write, name="drafter-save")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written.

        Raises:
            what went wrong.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def _write(self, version: int, params: Any, moments: Mapping[str, np.ndarray], fingerprint: str, record) -> None:
        part = self.root / f".{version}.part"
        part.mkdir(parents=True, exist_ok=True)
        safetensors.numpy.save_file(dict(moments), str(part / OPTIMIZER))
        facts = {"version": version, **(record or {})}
        checkpoint.save(part, self.drafter, params, target_fingerprint=fingerprint, record=facts)
        for path in part.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        part.rename(self.root / str(version))
        for old in saves(self.root)[: -self.keep]:
            shutil.rmtree(self.root / str(old))


@jax.jit
def device_copies(tree: Any) -> Any:
    """One launch for all leaves. The next step gives the buffers away; it has to wait for who still reads them, so order is kept."""
    return jax.tree.map(jnp.copy, tree)


def saves(root: str | os.PathLike) -> list[int]:
    """Versions that are saved completely, ascending."""
    root = pathlib.Path(root)
    return sorted(int(p.name) for p in root.iterdir() if p.name.isdigit()) if root.is_dir() else []


def load_optimizer(folder: str | os.PathLike, template: Any) -> Any:
    """The optimizer's state of a save, in the structure of `template` (of fresh parameters, say).

    Raises:
        FileNotFoundError: no such save.
        ValueError: its names or shapes are others than the template's.
    """
    path = pathlib.Path(folder) / OPTIMIZER
    if not path.is_file():
        raise FileNotFoundError(f"{path}: absent")
    found, wanted = safetensors.numpy.load_file(str(path)), named_arrays(template)
    for name in sorted(found.keys() | wanted.keys()):
        have, want = (None if name not in d else (d[name].shape, np.dtype(d[name].dtype)) for d in (found, wanted))
        if have != want:
            raise ValueError(f"{path}: {name} is {have}, expected {want}")
    return jax.tree.unflatten(jax.tree.structure(template), [jax.numpy.asarray(found[name]) for name in wanted])
