"""Evaluates the last checkpoint of a run on held-out prompts.

    python -m experiments.evaluate --config=experiments/configs/quickstart.py --workdir=runs/quickstart \\
        --config.evaluation.temperature=0

Give it the config and the flags of the run; `evaluation.*` and `task.eval_prompts` may differ. Prints the figures, the
worst-scored responses, and writes `evaluation.json` into the workdir: besides means, pass@1 of greedy answers and pass@k of the samples
(k = 1, 2, 4, … up to evaluation.samples), and with `--reference=FOLDER` (a policy, for instance the folder that experiments.sft
wrote) the win-rate against that policy's answers by the task's own score, the KL to it and the perplexity of our answers under it.
Intervals are 95 %, over prompts.
"""

import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adrl_jax.bandit.fixed import fixed
from adrl_jax.checkpoint import Checkpointer, CheckpointMismatch, check_identity
from adrl_jax.learner import packing
from adrl_jax.learner.update import make_log_probs, policy_params
from adrl_jax.metrics import CompileClock
from adrl_jax.models import weights
from adrl_jax.rewards import judging
from adrl_jax.runtime import collect, cursor, loop, publish
from adrl_jax.runtime.evaluation import evaluate
from adrl_jax.runtime.parts import LoopConfig, Parts, RunState
from experiments import build, config, flags, resolve
from experiments.config import Config
from experiments.schema import ConfigError
from experiments.train import exclusive, use_compilation_cache

_SHOWN = ("reward/mean", "reward/std", "score/unparsed_response", "frac_truncated", "len/mean", "len/max")


FLAGS = {**flags.WORKDIR, "reference": flags.Flag("folder of a policy to compare with; empty compares with none", "")}


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv` (program name first); returns the exit code."""
    if flags.wants_help(argv):
        print(flags.usage("experiments.evaluate", Config, FLAGS))
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        settings, other = flags.parse(argv, Config, FLAGS)
        settings = config.freeze(settings)
        workdir = Path(other["workdir"])
        if not (workdir / "checkpoints").is_dir():
            raise ConfigError(f"--workdir={str(workdir)!r} has no checkpoints; train there first")
        use_compilation_cache(settings.runtime.compilation_cache, workdir)
        with exclusive(workdir), build.opened(settings) as parts:
            limits = resolve.loop_config(settings)
            result, scored = of_checkpoint(parts, limits, workdir)
            result |= passes(parts, limits, scored)
            if other["reference"]:
                result |= against(parts, limits, scored, other["reference"])
    except (CheckpointMismatch, ValueError, OSError) as error:
        return flags.fail(error)
    loop.write_json(workdir / "evaluation.json", result)
    print(f"step {result['step']}, {len(scored.rollouts)} responses to {len(parts.eval_prompts)} held-out prompts")
    for name in _SHOWN:
        print(f"  {name:<24} {result[name]:.3f}")
    for name in (n for n in result if isinstance(result[n], dict)):
        estimate = result[name]
        print(f"  {name:<24} {estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]")
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
        policy_params(learner),
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


def passes(parts: Parts, config: LoopConfig, scored: collect.Scored) -> dict[str, Any]:
    """`pass@1_greedy` from one greedy answer a prompt, and `pass@k` from the samples, each with its interval."""
    greedy = dataclasses.replace(config.eval_sampling, temperature=0.0)
    _, likeliest, _ = evaluate(parts, greedy, 1, config.max_new_tokens, parts.bandit.init(), CompileClock())
    out = {"pass@1_greedy": judging.bootstrap(_right(likeliest))._asdict()}
    right = _right(scored).reshape(-1, config.eval_samples)
    ks = [2**i for i in range(right.shape[1].bit_length()) if 2**i <= right.shape[1]]
    return out | {f"pass@{k}": judging.pass_at_k(right, k)._asdict() for k in ks}


def _right(scored: collect.Scored) -> np.ndarray:
    return np.array([s.reason == "match" and s.value > 0 for s in scored.scores])


def against(parts: Parts, config: LoopConfig, scored: collect.Scored, folder: str) -> dict[str, Any]:
    """Win-rate, KL and perplexity against another policy's answers to the same prompts with the same noise.

    Raises:
        ConfigError: the folder holds a model of another vocabulary or family.
    """
    other = weights.load(folder)
    for name in ("family", "vocab_size"):
        ours, theirs = getattr(parts.model_config, name), getattr(other.config, name)
        if ours != theirs:
            raise ConfigError(f"--reference={folder!r} has {name}={theirs!r}, this run's policy {ours!r}")
    if dataclasses.replace(other.config, dtype=parts.model_config.dtype) != parts.model_config:
        raise ConfigError(f"--reference={folder!r} has other sizes than this run's policy: {other.config}")
    # Nothing speculates here; the engine still wants weights for the drafters it knows.
    drafter = parts.init_learner().drafter_params
    shot = publish.snapshot(other.params, 0, parts.model_config, drafter=drafter, others=parts.fixed_drafters)
    parts.engine.publish(shot.params, 0, shot.drafter_params)
    plain = fixed(parts.off, len(parts.strategies))
    _, theirs, _ = evaluate(
        dataclasses.replace(parts, bandit=plain),
        config.eval_sampling,
        config.eval_samples,
        config.max_new_tokens,
        plain.init(),
        CompileClock(),
    )
    shape = (-1, config.eval_samples)
    out = {"win_rate": judging.win_rate(scored.rewards.reshape(shape), theirs.rewards.reshape(shape))._asdict()}
    temperature = config.eval_sampling.temperature
    if temperature > 0 and not config.eval_sampling.filtered:
        longest = max(len(r.token_ids) for r in scored.rollouts)
        batch = packing.pack(scored.rollouts, np.zeros(len(scored.rollouts)), row_length=packing.round_up(longest, 64))
        log_probs = make_log_probs(other.config, temperature=temperature, valid_vocab=parts.tokenizer.size)
        under = packing.unpack_targets(batch, log_probs(other.params, batch)[0], len(scored.rollouts))
        own = [r.log_probs for r in scored.rollouts]
        out["kl_to_reference"] = judging.divergence(own, under)._asdict()
        out["perplexity_under_reference"] = judging.perplexity(under)
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv))
