"""`refresh=auto` in a real run: it changes its mind for whole batches, by what earlier ones were like, and what is then learnt from is
what the newest policy draws."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from async_world import Worlds, small

from adrl_jax.bandit.fixed import fixed
from adrl_jax.learner.update import policy_params
from adrl_jax.metrics import read_lines
from adrl_jax.models.transformer import engine_layout
from adrl_jax.types import Request, SamplingParams

FREE = {"runtime.refresh": "auto", "runtime.refresh_cost": 1e9}  # costs, which are seconds, decide nothing


@pytest.fixture(scope="module")
def worlds():
    with contextlib.ExitStack() as stack:
        yield Worlds(stack)


class Spy:
    """`prepare`, which notes what each step learns from, and with which weights."""

    def __init__(self, inner):
        self.inner, self.seen = inner, []

    def __call__(self, learner, scored, step):
        params = jax.tree.map(lambda x: jnp.array(x, copy=True), policy_params(learner))
        self.seen.append((step, params, int(learner.version), list(scored.rollouts), list(scored.prompts)))
        return self.inner(learner, scored, step)


def run(worlds, workdir, above):
    """Metrics by step, and what was seen."""
    spy = Spy(worlds.parts(small("lagged")).prepare)
    changes = FREE | {"runtime.refresh_above": above}
    assert worlds.run(workdir, "lagged", parts={"prepare": spy}, **changes).status == "done"
    return [r for r in read_lines(workdir / "metrics.jsonl") if r["phase"] == "train"], spy.seen


@pytest.fixture(scope="module")
def corrected(worlds, tmp_path_factory):
    """With a bound that is never reached."""
    return run(worlds, tmp_path_factory.mktemp("corrected"), 1.0)


def expectations(rows):
    """What the rule expects of each batch before it is there: the running mean of disagreement a version (0.8 of the old one and 0.2 of
    the new), times the batch's lag; None before the first."""
    known, out = None, []
    for i, row in enumerate(rows):
        lag = min(i, 2)
        out.append(None if known is None or not lag else known * lag)
        if lag:
            found = row["staleness/disagreement"] / lag
            known = found if known is None else 0.8 * known + 0.2 * found
    return out


@pytest.fixture(scope="module")
def turn(corrected):
    """The first batch of which disagreement is expected, as a step, and how much."""
    rows, _ = corrected
    assert [r["refresh/share"] for r in rows] == [0] * 6 and [r["staleness/max"] for r in rows] == [0, 1, 2, 2, 2, 2]
    return next((i + 1, x) for i, x in enumerate(expectations(rows)) if x)


@pytest.fixture(scope="module")
def refreshed(worlds, turn, tmp_path_factory):
    """With a bound that this batch is the first to reach."""
    return run(worlds, tmp_path_factory.mktemp("refreshed"), 0.99 * turn[1])


def test_batches_are_corrected_until_earlier_ones_disagreed_enough(worlds, corrected, refreshed, turn, tmp_path):
    step, expected = turn
    rows, seen = corrected
    assert 3 <= step <= 6  # not before something stale was measured
    assert [r["refresh/share"] for r in refreshed[0][:step]] == [0] * (step - 1) + [1]
    above, _ = run(worlds, tmp_path, 1.01 * expected)
    assert [r["refresh/share"] for r in above[:step]] == [0] * step
    # Up to the decision all are one run; then one learns from the newest policy's tokens and the others from those of two before.
    for a, b in zip(rows[: step - 1], refreshed[0]):
        assert a["fingerprint"] == b["fingerprint"]
    made, stale = refreshed[0][step - 1], rows[step - 1]
    assert made["staleness/max"] == 0 == made["staleness/disagreement"] and stale["staleness/max"] == 2
    assert made["fingerprint"] != stale["fingerprint"] == above[step - 1]["fingerprint"]
    versions = [{int(v) for r in x[step - 1][3] for v in r.policy_versions} for x in (refreshed[1], seen)]
    assert versions == [{step - 1}, {step - 3}]  # the whole batch, either way


def test_a_batch_made_current_is_a_fresh_rollout_token_for_token(worlds, corrected, refreshed, turn):
    rows, seen = refreshed
    step, params, version, rollouts, prompts = seen[turn[0] - 1]
    assert step == turn[0] and version == step - 1
    parts = worlds.parts(small("lagged"))
    parts.engine.publish(engine_layout(params, parts.model_config), version)
    requests = [Request(p, r.visit, r.sample, r.group_id, 20) for p, r in zip(prompts, rollouts)]
    plain = fixed(parts.off, len(parts.strategies))
    fresh = parts.engine.generate(requests, SamplingParams(), plain, plain.init()).rollouts
    changed = 0
    for made, drawn, stale in zip(rollouts, fresh, corrected[1][step - 1][3], strict=True):
        np.testing.assert_array_equal(made.token_ids, drawn.token_ids)
        np.testing.assert_allclose(made.log_probs, drawn.log_probs, atol=2e-5)
        np.testing.assert_array_equal(made.policy_versions, np.full(made.response_length, version))
        assert made.finish_reason == drawn.finish_reason
        assert (made.prompt_id, made.visit, made.sample) == (stale.prompt_id, stale.visit, stale.sample)
        changed += made.token_ids.tolist() != stale.token_ids.tolist()
    assert rows[step - 1]["refresh/changed"] == changed / len(rollouts)
