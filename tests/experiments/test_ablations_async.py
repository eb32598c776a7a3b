"""Ablations of stale data: names, settings, tables; and one small run of each from end to end (slow)."""

import json

import pytest

from experiments import presets
from experiments.ablations import common, refresh, staleness
from experiments.schema import ConfigError

SMALL = {
    "warm_start.steps": 2, "warm_start.batch_size": 4, "warm_start.examples": 8, "task.train_prompts": 12, "task.eval_prompts": 4,
    "task.max_steps": 5, "task.median_steps": 2.0, "model.num_layers": 1, "model.hidden_size": 16, "model.intermediate_size": 32, "model.num_heads": 2,
    "model.num_kv_heads": 1, "model.head_dim": 8, "train.prompts_per_step": 2, "train.group_size": 2, "train.max_new_tokens": 24,
    "rollout.max_batch": 4, "rollout.batch_buckets": [4], "learner.row_length": 0, "learner.row_multiple": 4,
}  # fmt: skip


def test_every_preset_is_a_correction_and_the_control_is_uncorrected():
    names = common.corrections()
    assert set(presets.PRESETS) < set(names) and set(staleness.CORRECTIONS) <= set(names)
    for name in staleness.CORRECTIONS:
        c = common.settings(name, 1, 5, {"runtime.lag": 4})
        assert c.runtime.mode == "lagged" and c.runtime.lag == 4 and c.seed == 1 and c.train.steps == 5
        assert c.runtime.allow_uncorrected == (name == "none")
    with pytest.raises(ConfigError, match="no importance correction"):
        common.settings("none", 0, 5, {"runtime.allow_uncorrected": False})
    with pytest.raises(ConfigError, match="preset='nonsense' is unknown"):
        common.settings("nonsense", 0, 5, {})


def rows():
    cell = dict(reused=None, refresh_s=None, generate_s=2.0, seconds=3.0, disagreement=0.1)
    out = [dict(mode="corrected", lag=k, length="short", seed=s, reward=0.5 + 0.1 * s, **cell) for k in (1, 2) for s in (0, 1)]
    return out + [dict(out[0], mode="refreshed", reused=0.75, refresh_s=1.0)]


def test_tables_and_verdicts_from_rows(tmp_path):
    text = refresh.table(rows())
    assert "0.550" in text and "0.75" in text and text.count("\n") == 3
    assert refresh.verdict(rows()) == {"refresh_over_generate_short_lag1": 0.5}
    refresh.plot(rows(), tmp_path / "a.svg")
    found = [dict(correction=c, lag=k, seed=s, reward_end=0.1 * s) for c in ("none", "tis") for k in (0, 4) for s in (0, 1)]
    assert "0.050 ± 0.071" in staleness.table(found)
    staleness.plot(found, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").stat().st_size and (tmp_path / "b.svg").stat().st_size


@pytest.mark.slow
def test_small_forms_run_to_their_end(tmp_path):
    form = staleness.main(
        [f"--changes={json.dumps(SMALL)}", "--lags=0,1", "--corrections=none,ppo_clip", "--steps=3", "--seeds=1",
         f"--json={tmp_path / 's.json'}", f"--plot={tmp_path / 's.svg'}"]
    )  # fmt: skip
    assert [(r["correction"], r["lag"], r["seed"]) for r in form["results"]["rows"]] == [
        (c, k, 0) for c in ("none", "ppo_clip") for k in (0, 1)
    ]
    changes = json.dumps(SMALL)
    form = refresh.main(
        [f"--changes={changes}", "--lags=1", "--lengths=short", "--steps=4", "--seeds=1", f"--json={tmp_path / 'r.json'}"]
    )
    modes = [(r["mode"], r["lag"]) for r in form["results"]["rows"]]
    assert modes == [("none", 1), ("on_policy", 0), ("corrected", 1), ("refreshed", 1)]
    refreshed, fresh = form["results"]["rows"][3], form["results"]["rows"][1]
    assert refreshed["reward"] == pytest.approx(fresh["reward"], abs=1e-9) and 0 <= refreshed["reused"] <= 1
