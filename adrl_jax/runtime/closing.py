"""What a finished run leaves behind: the closing comparison, summary.json and the report."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from adrl_jax import report
from adrl_jax.metrics import CompileClock
from adrl_jax.runtime import collect, compare, cursor
from adrl_jax.runtime.folder import write_json
from adrl_jax.runtime.parts import LoopConfig, Parts, RunState


def comparison(
    parts: Parts,
    config: LoopConfig,
    params: Any,
    state: RunState,
    clock: CompileClock,
    *,
    on_run: Callable[[], None],
    check: Callable[[], None],
) -> compare.Comparison:
    """The batch that would come next, with and without speculation, under `params`, which the engine serves."""
    indices, visits, _ = cursor.draw(state.cursor, config.prompts_per_step)
    prompts = [parts.train_prompts[int(i)] for i in indices]
    requests = collect.requests_for(prompts, visits, config.group_size, config.max_new_tokens)
    return compare.speculation(
        parts,
        params,
        requests,
        config.sampling,
        state.bandit,
        clock,
        repeats=config.compare_repeats,
        on_run=on_run,
        on_launch=lambda launch: check(),
    )


def write(
    workdir: Path, config: LoopConfig, facts: Mapping[str, Any], found: compare.Comparison | None, seconds: float
) -> dict[str, Any]:
    """Writes summary.json and, where asked for, the report; returns the summary."""
    evaluations, passes = facts["evaluations"], facts["accept_passes"]
    # Over all training rollouts; None where nothing ever speculated.
    trained = facts["accept_tokens"] / passes if passes else None
    summary = {
        "reward_start": evaluations.get("0"),
        "reward_end": evaluations[str(config.steps)],
        "rollout_speedup": found and found.speedup,
        "accept_length": found.accept_length if found and found.accept_length else trained,
        "identical_tokens": found and found.identical,
        "seconds": seconds,
        "steps": config.steps,
    }
    if found is not None:
        summary |= found.details()
    write_json(workdir / "summary.json", summary)
    if config.report:
        report.write(workdir)
    return summary
