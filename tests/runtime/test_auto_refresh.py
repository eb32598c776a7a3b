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

FREE = {"runtime.refresh": "auto", "runtime.refresh_cost": 1e9, "train.steps": 4}  # costs, which are seconds, decide nothing


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


def test_batches_are_corrected_until_earlier_ones_disagreed_enough(worlds, corrected, tmp_path_factory):
    rows, seen = corrected
    assert [r["refresh/share"] for r in rows] == [0, 0, 0, 0] and [r["staleness/max"] for r in rows] == [0, 1, 2, 2]
    # Step 2 was the first with stale data (lag 1); step 3, of lag 2, is expected to disagree twice as much.
    found = rows[1]["staleness/disagreement"]
    assert 0 < found < 0.5
    just_below, seen_below = run(worlds, tmp_path_factory.mktemp("below"), 1.9 * found)
    just_above, _ = run(worlds, tmp_path_factory.mktemp("above"), 2.1 * found)
    assert [r["refresh/share"] for r in just_below[:3]] == [0, 0, 1] and just_above[2]["refresh/share"] == 0
    # Up to the decision the runs are one run; then one learns from policy 2's tokens and the other from policy 0's.
    for a, b in zip(rows[:2], just_below[:2]):
        assert a["fingerprint"] == b["fingerprint"]
    for versions, (_, _, version, rollouts, _) in zip(((0,), (0,), (2,)), seen_below):
        assert {int(v) for r in rollouts for v in r.policy_versions} == set(versions), version
    assert {int(v) for r in seen[2][3] for v in r.policy_versions} == {0}
    assert just_below[2]["staleness/max"] == 0 and just_below[2]["staleness/disagreement"] == 0
    assert just_below[2]["fingerprint"] != rows[2]["fingerprint"]


def test_a_batch_made_current_is_a_fresh_rollout_token_for_token(worlds, corrected, tmp_path):
    found = corrected[0][1]["staleness/disagreement"]
    rows, seen = run(worlds, tmp_path, 1.9 * found)
    step, params, version, rollouts, prompts = seen[2]
    assert step == 3 and version == 2 and rows[2]["refresh/share"] == 1
    parts = worlds.parts(small("lagged"))
    parts.engine.publish(engine_layout(params, parts.model_config), version)
    requests = [Request(p, r.visit, r.sample, r.group_id, 20) for p, r in zip(prompts, rollouts)]
    plain = fixed(parts.off, len(parts.strategies))
    fresh = parts.engine.generate(requests, SamplingParams(), plain, plain.init()).rollouts
    changed = 0
    for made, drawn, stale in zip(rollouts, fresh, corrected[1][2][3], strict=True):
        np.testing.assert_array_equal(made.token_ids, drawn.token_ids)
        np.testing.assert_allclose(made.log_probs, drawn.log_probs, atol=2e-5)
        np.testing.assert_array_equal(made.policy_versions, np.full(made.response_length, version))
        assert made.finish_reason == drawn.finish_reason
        assert (made.prompt_id, made.visit, made.sample) == (stale.prompt_id, stale.visit, stale.sample)
        changed += made.token_ids.tolist() != stale.token_ids.tolist()
    assert changed and rows[2]["refresh/changed"] == changed / len(rollouts)
