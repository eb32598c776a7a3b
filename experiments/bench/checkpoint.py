"""How long training stands still for a save of the drafter.

python -m experiments.bench.checkpoint --json=checkpoint.json

Three ways to save an EAGLE drafter of SmolLM2-135M's sizes with its AdamW state (random numbers; a save does not care):
synchronously and whole, embedding and vocabulary projection of the target included, as a trainer that saves its model does;
whole from a copy in the background; and what this library does: what is trained alone, copied on the device and written in the
background (`drafter.saving`). Each is atomic: written under another name, synced to disk, renamed. Figures are milliseconds until
the caller may go on. `async_selective_copied_ms` is when that copy on the device was there, too: a next update that takes the
buffers over waits so long at most.
"""

import functools
import os
import pathlib
import shutil
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from adrl_jax.checkpoint import named_arrays
from adrl_jax.drafter import saving
from adrl_jax.drafter.saving import DrafterSaver
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.models.families import ModelConfig
from adrl_jax.speculation import eagle
from adrl_jax.speculation.eagle import Eagle
from experiments.bench import form

SMOLLM2 = ModelConfig("llama", 49_152, 576, 1536, 30, 9, 3, 64)


class World:
    """The drafter, its optimizer's state, the target's shares, and a folder to save to."""

    def __init__(self, config: ModelConfig, folder: pathlib.Path):
        self.drafter, self.folder = Eagle(config), folder
        self.params = self.drafter.init_params(jax.random.key(0))
        optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-4))
        self.opt_state = optimizer.init(eagle.split(self.params)[0])
        self.shared = {"embedding": jax.random.normal(jax.random.key(1), (config.vocab_size, config.hidden_size), jnp.float32)}
        jax.block_until_ready((self.params, self.opt_state, self.shared))
        self.saver = DrafterSaver(folder / "selective", self.drafter, keep=1)
        self.saves = 0

    def whole(self) -> dict[str, jax.Array]:
        return named_arrays({"drafter": self.params, "optimizer": self.opt_state, "target": self.shared})

    def write_whole(self, arrays: dict[str, np.ndarray]) -> None:
        part, last = self.folder / ".whole.part", self.folder / "whole.safetensors"
        safetensors.numpy.save_file(arrays, str(part))
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(last)

    def sync_full(self) -> float:
        began = time.perf_counter()
        self.write_whole({name: np.asarray(x) for name, x in self.whole().items()})
        return time.perf_counter() - began

    def async_full(self) -> float:
        began = time.perf_counter()
        copies = {name: np.array(x, copy=True) for name, x in self.whole().items()}
        thread = threading.Thread(target=functools.partial(self.write_whole, copies))
        thread.start()
        stall = time.perf_counter() - began
        thread.join()
        return stall

    def async_selective(self) -> float:
        self.saves += 1
        began = time.perf_counter()
        self.saver.save(self.saves, self.params, self.opt_state, target_fingerprint="")
        stall = time.perf_counter() - began
        self.saver.wait()
        return stall

    def copied(self) -> float:
        trained = eagle.split(self.params)[0]
        began = time.perf_counter()
        jax.block_until_ready(saving.device_copies((trained, self.opt_state)))
        return time.perf_counter() - began

    def bytes_of(self, tree) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(tree))


def main(argv=None) -> dict:
    parser = form.parser(__doc__)
    parser.add_argument("--folder", default=None, help="where saves go; default: a temporary folder, removed at the end")
    args = parser.parse_args(argv)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="adrl-checkpoint-", dir=args.folder))
    try:
        world = World(SMOLLM2, folder)

        def side(name: str):
            def once() -> float:
                seconds = getattr(world, name)()
                print(f"  {name}: {1e3 * seconds:.1f} ms", flush=True)
                return seconds

            return once

        sides = {name: side(name) for name in ("sync_full", "async_full", "async_selective")}
        records = form.alternate(sides, max(args.repeats, 5))
        records["async_selective_copied"] = form.alternate({"copied": world.copied}, max(args.repeats, 5))["copied"]
    finally:
        shutil.rmtree(folder)
    results = {f"{name}_ms": 1e3 * form.median(found) for name, found in records.items()}
    results["sync_full_over_async_selective"] = results["sync_full_ms"] / results["async_selective_ms"]
    results["full_mb"] = world.bytes_of(world.whole()) / 2**20
    results["selective_mb"] = world.bytes_of((world.params, world.opt_state)) / 2**20
    return form.finish("checkpoint", vars(args), results, args.json)


if __name__ == "__main__":
    main()
