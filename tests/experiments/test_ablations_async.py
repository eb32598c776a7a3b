"""Ablations of stale data: names, settings, tables; and one small run of each from end to end (slow)."""

import json

import numpy as np
import pytest

from adrl_jax.runtime import loop
from experiments import presets
from experiments.ablations import common, plots, refresh, staleness
from experiments.ablations.rows import Rows
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
        c = common.settings(name, 5, 1e-3, {"runtime.lag": 4})
        assert c.runtime.mode == "lagged" and c.runtime.lag == 4 and c.train.steps == 5 and c.learner.learning_rate == 1e-3
        assert c.runtime.allow_uncorrected == (name == "none")
    with pytest.raises(ConfigError, match="no importance correction"):
        common.settings("none", 5, 1e-3, {"runtime.allow_uncorrected": False})
    with pytest.raises(ConfigError, match="preset='nonsense' is unknown"):
        common.settings("nonsense", 5, 1e-3, {})


def rows():
    cell = dict(reused=None, refresh_s=None, generate_s=2.0, seconds=3.0, disagreement=0.1)
    out = [dict(mode="corrected", lag=k, length="short", seed=s, reward=0.5 + 0.1 * s, **cell) for k in (1, 2) for s in (0, 1)]
    return out + [dict(out[0], mode="refreshed", reused=0.75, refresh_s=1.0)]


def test_tables_and_verdicts_from_rows(tmp_path):
    text = refresh.table(rows())
    assert "0.550" in text and "0.75" in text and text.count("\n") == 3
    assert refresh.verdict(rows()) == {"refresh_over_generate_short_lag1": 0.5}
    fresh = dict(rows()[0], mode="on_policy", lag=0, reward=0.4)
    assert refresh.verdict([*rows(), fresh])["refreshed_less_on_policy_short_lag1"] == pytest.approx(0.1)
    refresh.plot(rows(), tmp_path / "a.svg")
    found = [dict(correction=c, lag=k, seed=s, reward_end=0.1 * s) for c in ("none", "tis") for k in (0, 4) for s in (0, 1)]
    assert "0.050 ± 0.071" in staleness.table(found)
    staleness.plot(found, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").stat().st_size and (tmp_path / "b.svg").stat().st_size


def test_rates_leave_out_the_first_two_steps_and_those_that_generate_nothing(tmp_path):
    lines = [{"phase": "evaluate", "step": 0, "reward/mean": 0.25}, {"phase": "evaluate", "step": 6, "reward/mean": 0.75}]
    for i in range(6):
        row = {"phase": "train", "step": i + 1, "reward/mean": 0.1 * i, "time/rollout": 10.0**i, "time/step": 2 * 10.0**i}
        lines.append(row | {"time/compile": 1.0 * (i == 0), "refresh/reused": 0.5 if i == 3 else None})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = common.measured(tmp_path, lag=2)  # steps 3 and 4 are left
    assert (found["reward_start"], found["reward_end"], found["reward_best"]) == (0.25, 0.75, 0.5)
    assert found["generate_s"] == 550 and found["seconds"] == 1100 and found["reused"] == 0.5 and found["ess"] is None
    assert common.measured(tmp_path, lag=9)["generate_s"] == pytest.approx(111111 / 6)  # none left: all of them


def test_intervals_are_student_t_and_one_run_has_none():
    assert plots.interval([2.0]) == (2.0, 2.0, 2.0)
    mean, low, high = plots.interval([1.0, 2.0, 3.0])
    half = 4.302652729911275 * 1.0 / np.sqrt(3)  # t at 97.5 % with two degrees of freedom
    assert (mean, low, high) == pytest.approx((2.0, 2.0 - half, 2.0 + half))


def test_what_age_costs_is_paired_by_seed():
    ends = {(0, 0): 0.9, (0, 1): 0.7, (8, 0): 0.6, (8, 1): 0.3}
    found = staleness.lost([dict(correction="tis", lag=k, seed=s, reward_end=r) for (k, s), r in ends.items()])
    assert found["tis"]["lag"] == 8 and found["tis"]["change"] == pytest.approx(-0.35)
    assert staleness.lost([dict(correction="tis", lag=0, seed=0, reward_end=0.5)]) == {}


def test_a_study_goes_on_after_the_rows_it_has(tmp_path, capsys):
    path = str(tmp_path / "deep" / "r.json")
    how = dict(same=("steps",), keys=("name", "seed"), wanted=[(n, s) for s in (0, 1) for n in ("a", "b")])
    first = Rows("study", path, {"steps": 4, "json": path}, **how)
    assert first.missing == how["wanted"]
    first.add({"name": "b", "seed": 0, "x": 1.5}, "b 0")
    assert "[1/4] b 0; " in capsys.readouterr().err
    again = Rows("study", path, {"steps": 4, "json": "elsewhere.json"}, **how)
    assert again.missing == [("a", 0), ("a", 1), ("b", 1)] and again.rows == [{"name": "b", "seed": 0, "x": 1.5}]
    for key in again.missing:
        again.add(dict(zip(("name", "seed"), key)), "")
    assert Rows("study", path, {"steps": 4}, **how).missing == []
    with pytest.raises(ConfigError, match=r"made with steps=4, this run has 5"):
        Rows("study", path, {"steps": 5}, **how)
    with pytest.raises(ConfigError, match=r"rows of 'study', this is 'other'"):
        Rows("other", path, {"steps": 4}, **how)
    for text in ("no JSON", "[]", "{}"):
        (tmp_path / "odd.json").write_text(text)
        with pytest.raises(ConfigError, match="not a form of this study"):
            Rows("study", str(tmp_path / "odd.json"), {"steps": 4}, **how)
    assert Rows("study", None, {"steps": 4}, **how).missing == how["wanted"]


@pytest.mark.parametrize(
    "study,flags,message",
    [
        (staleness, ["--corrections=none,tsi"], "--corrections='tsi' is unknown; choose of none, ppo_clip"),
        (staleness, ["--corrections="], "names nothing"),
        (staleness, ["--lags=1,-1"], "--lags=-1 must be >= 0"),
        (staleness, ["--seeds=0"], "--seeds=0 must be >= 1"),
        (staleness, ["--changes={'a': 1}"], "is no JSON"),
        (staleness, ["--changes=[1]"], "must be an object of config fields"),
        (refresh, ['--changes={"train.group": 4}'], 'changes: Key "group" does not exist'),
        (refresh, ["--lags=0"], "--lags=0 must be >= 1"),
        (refresh, ["--lengths=middle"], "--lengths='middle' is unknown; choose of short, long"),
    ],
)
def test_wrong_flags_are_named_before_anything_runs(study, flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        study.main([*flags, f"--workdir={tmp_path / 'w'}"])
    assert message in capsys.readouterr().err and not (tmp_path / "w").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("starts")


def flags(folder, *more):
    return [f"--changes={json.dumps(SMALL)}", "--steps=3", f"--workdir={folder}", *more]


@pytest.mark.slow
def test_the_small_form_of_staleness_runs_to_its_end_and_goes_on(folder, tmp_path, monkeypatch):
    path = tmp_path / "s.json"
    args = flags(folder / "s", "--lags=0,1", "--corrections=none,ppo_clip", "--seeds=2", f"--json={path}")
    real, ran = loop.run, []

    def stopped_at_the_fourth(*args, **more):
        ran.append(args)
        return loop.Outcome("stopped", None) if len(ran) == 4 else real(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "run", stopped_at_the_fourth)
        with pytest.raises(SystemExit, match="stopped on request; the same command goes on"):
            staleness.main(args)
    written = json.loads(path.read_text())
    assert len(written["results"]["rows"]) == 3 and "3 of 8 runs" in written["config"]["notes"]["rows"]
    monkeypatch.setattr(loop, "run", lambda *args, **more: (ran.append(args), real(*args, **more))[1])
    found = staleness.main([*args, f"--plot={tmp_path / 's.svg'}"])
    assert len(ran) == 4 + 5  # three of eight runs were not run again
    rows = found["results"]["rows"]
    assert [(r["seed"], r["correction"], r["lag"]) for r in rows] == [
        (s, c, k) for s in (0, 1) for c in ("none", "ppo_clip") for k in (0, 1)
    ]
    # One start for all; noise and prompts by seed, so runs differ.
    assert rows[0]["staleness"] == 0 and rows[1]["staleness"] > 0
    assert (tmp_path / "s.svg").stat().st_size and "notes" not in json.loads(path.read_text())["config"]


@pytest.mark.slow
def test_the_small_form_of_refresh_runs_to_its_end(folder, tmp_path):
    path = tmp_path / "r.json"
    found = refresh.main(
        flags(folder / "r", "--lags=1", "--lengths=short", "--seeds=1", f"--json={path}", f"--plot={tmp_path / 'r.svg'}")
    )
    rows = found["results"]["rows"]
    assert [(r["mode"], r["lag"]) for r in rows] == [("on_policy", 0), ("none", 1), ("corrected", 1), ("refreshed", 1)]
    fresh, refreshed = rows[0], rows[3]
    assert refreshed["reward"] == pytest.approx(fresh["reward"], abs=1e-9) and 0 <= refreshed["reused"] <= 1


@pytest.mark.slow
def test_a_start_made_with_other_settings_is_refused(folder):
    c = common.settings("tis", 3, 1e-3, SMALL)
    assert common.start(c, folder / "s").warm_start.steps == 0
    with pytest.raises(ConfigError, match=r"trained with warm_start.steps=2, this run has 3; name another folder"):
        common.start(common.settings("tis", 3, 1e-3, SMALL | {"warm_start.steps": 3}), folder / "s")
