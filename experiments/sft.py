"""Supervised fine-tuning on a task's worked examples, RLHF's first stage.

    python -m experiments.sft --config=experiments/configs/quickstart.py --workdir=runs/sft --config.warm_start.steps=300

`warm_start.*` says how long, how fast and on what. The workdir gets the policy as a folder that `model.source` takes (and that Hugging Face
transformers reads), `config.json`, and `sft.json`: perplexity before and after on worked examples past the first `warm_start.examples`, which are
held out where the task has that many.
Exit codes: 0 done, 2 a setting is wrong.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from adrl_jax.learner import packing, supervised
from adrl_jax.learner.optimizer import make_optimizer
from adrl_jax.learner.update import data_mesh, init_state, make_log_probs
from adrl_jax.metrics import JsonLines
from adrl_jax.models import weights
from adrl_jax.rewards import judging
from adrl_jax.runtime import numbers
from adrl_jax.runtime.progress import Progress
from experiments import build, config, flags, learners, resolve
from experiments.config import Config
from experiments.learners import Policy
from experiments.schema import ConfigError, require
from experiments.train import exclusive, use_compilation_cache

POLICY = "policy"
"""Folder of the weights below the workdir."""


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv` (program name first); returns the exit code."""
    if flags.wants_help(argv):
        print(flags.usage("experiments.sft", Config))
        return 0
    try:
        settings, other = flags.parse(argv, Config)
        settings = config.freeze(settings)
        require(settings.warm_start.steps > 0, "warm_start.steps", settings.warm_start.steps, "how many updates?")
        workdir = Path(other["workdir"])
        try:
            workdir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--workdir={str(workdir)!r} cannot be made: {error.strerror}") from None
        with exclusive(workdir):
            use_compilation_cache(settings.runtime.compilation_cache, workdir)
            record = run(settings, workdir)
    except (ValueError, OSError) as error:
        return flags.fail(error)
    before, after = record["perplexity_before"], record["perplexity_after"]
    print(
        f"perplexity of held-out examples {before:.3f} before, {after:.3f} after {record['steps']} updates; {workdir / POLICY}"
    )
    return 0


def run(c: Config, workdir: Path) -> dict[str, Any]:
    """Trains, measures and saves; returns what is written to `sft.json`.

    Raises:
        ConfigError, ValueError, FileNotFoundError: something that the user can mend.
    """
    config.save(c, workdir / "config.json")
    task = build.open_task(c)
    target = build.policy(c, build.ALPHABETS.get(c.task.name))
    task = task.encode(target.tokenizer)
    pack = learners.packer(c, target.config)
    batches = build.warm_batches(c, task, target, pack)
    mesh = data_mesh(c.learner.devices)
    optimizer = make_optimizer(resolve.warm_optimizer_config(c))
    update = supervised.make_supervised_update(
        target.config,
        optimizer,
        mesh,
        microbatch_rows=c.learner.microbatch_rows,
        valid_vocab=target.tokenizer.size,
        remat=c.learner.remat,
        vocab_block=c.learner.vocab_block or None,
    )
    log_probs = make_log_probs(target.config, valid_vocab=target.tokenizer.size, mesh=mesh)
    held_out = _held_out(c, task, target, pack)
    state = learners.on_mesh(init_state(target.make(), optimizer), mesh)
    record: dict[str, Any] = {"steps": c.warm_start.steps, "perplexity_before": _perplexity(log_probs, state.params, held_out)}
    lines = JsonLines(workdir / "metrics.jsonl", 0)
    progress = Progress("sft", c.warm_start.steps)
    for step in range(c.warm_start.steps):
        state, values = update(state, batches(step))
        values = numbers.on_host(values)
        lines.append({"phase": "sft", "step": step + 1, **values})
        progress.step(loss=values["loss"])
    progress.close()
    lines.close()
    record["perplexity_after"] = _perplexity(log_probs, state.params, held_out)
    weights.save_hf(workdir / POLICY, target.config, jax.device_get(state.params), target.tokenizer)
    (workdir / "sft.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def _held_out(c: Config, task: Any, target: Policy, pack: Any) -> Any:
    """Worked examples past those that are trained on, as one packed batch."""
    end = np.array(target.tokenizer.eos_ids[:1], np.int32)
    pairs = []
    for i in range(c.warm_start.examples, c.warm_start.examples + c.warm_start.batch_size):
        prompt, response = task.supervised_example(i)
        pairs.append((target.tokenizer.encode(prompt), np.concatenate([target.tokenizer.encode(response), end])))
    return pack(supervised.examples(pairs), np.zeros(len(pairs), np.float32), 0)


def _perplexity(log_probs: Any, params: Any, batch: Any) -> float:
    count = int(np.asarray(batch.rollout_index)[np.asarray(batch.target_mask)].max()) + 1
    return judging.perplexity(packing.unpack_targets(batch, log_probs(params, batch)[0], count))


def of_source(c: Config, folder: Path) -> Config:
    """The settings with the trained policy as `model.source` and no warm start of its own."""
    model = dataclasses.replace(c.model, source=str(folder / POLICY))
    return dataclasses.replace(c, model=model, warm_start=dataclasses.replace(c.warm_start, steps=0))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
