"""Evaluates the last checkpoint of a run on held-out prompts.

    python -m experiments.evaluate --config=experiments/configs/quickstart.py --workdir=runs/quickstart \\
        --config.evaluation.temperature=0

Give it the config and the flags of the run; `evaluation.*` and `task.eval_prompts` may differ. Prints the figures, the
worst-scored responses, and writes `evaluation.json` into the workdir.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adrl_jax.checkpoint import Checkpointer, CheckpointMismatch, check_identity
from adrl_jax.metrics import CompileClock
from adrl_jax.runtime import collect, cursor, loop, publish
from adrl_jax.runtime.evaluation import evaluate
from adrl_jax.runtime.parts import LoopConfig, Parts, RunState
from experiments import build, config, flags, resolve
from experiments.config import Config
from experiments.schema import ConfigError
from experiments.train import exclusive, use_compilation_cache

_SHOWN = ("reward/mean", "reward/std", "score/unparsed_response", "frac_truncated", "len/mean", "len/max")


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv` (program name first); returns the exit code."""
    if flags.wants_help(argv):
        print(flags.usage("experiments.evaluate", Config))
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        settings, other = flags.parse(argv, Config)
        settings = config.freeze(settings)
        workdir = Path(other["workdir"])
        if not (workdir / "checkpoints").is_dir():
            raise ConfigError(f"--workdir={str(workdir)!r} has no checkpoints; train there first")
        use_compilation_cache(settings.runtime.compilation_cache, workdir)
        with exclusive(workdir), build.opened(settings) as parts:
            result, scored = of_checkpoint(parts, resolve.loop_config(settings), workdir)
    except (CheckpointMismatch, ValueError, OSError) as error:
        return flags.fail(error)
    loop.write_json(workdir / "evaluation.json", result)
    print(f"step {result['step']}, {len(scored.rollouts)} responses to {len(parts.eval_prompts)} held-out prompts")
    for name in _SHOWN:
        print(f"  {name:<24} {result[name]:.3f}")
    for i in np.argsort(scored.rewards, kind="stable")[:3]:
        print(f"  reward {scored.rewards[i]:.2f}: {scored.prompts[i].text[-60:]!r} -> {scored.texts[i][:80]!r}")
    return 0


def of_checkpoint(parts: Parts, config: LoopConfig, workdir: Path) -> tuple[dict[str, Any], collect.Scored]:
    """Restores the last checkpoint below `workdir`, publishes it and evaluates.

    Raises:
        ValueError: there is none.
        CheckpointMismatch: it is of another model, task or seed.
    """
    saver = Checkpointer(workdir / "checkpoints", keep=config.checkpoints_kept)
    step = saver.latest()
    if step is None:
        raise ValueError(f"{workdir / 'checkpoints'} holds no complete checkpoint")
    check_identity(saver.host(step)["identity"], parts.identity, f"checkpoint {step} in {workdir}")
    start = cursor.init(config.seed, len(parts.train_prompts))
    state = saver.restore(step, RunState(parts.init_learner(), parts.bandit.init(), start, np.int32(0), np.int32(0)))
    saver.close()
    learner = state.learner
    snap = publish.snapshot(
        learner.params,
        int(learner.version),
        parts.model_config,
        drafter=learner.drafter_params,
        drafter_version=int(learner.drafter_version),
        others=parts.fixed_drafters,
    )
    parts.engine.publish(snap.params, snap.version, snap.drafter_params, snap.drafter_version)
    row, scored, _ = evaluate(
        parts, config.eval_sampling, config.eval_samples, config.max_new_tokens, state.bandit, CompileClock()
    )
    return {"step": int(state.step), "version": snap.version, "fingerprint": snap.fingerprint, **row}, scored


if __name__ == "__main__":
    sys.exit(main(sys.argv))
