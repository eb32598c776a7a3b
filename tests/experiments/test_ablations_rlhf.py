"""The study of mini-batches and the table of presets: small forms from end to end (slow), ended and gone on with; tables and pictures."""

import json

import numpy as np
import pytest
from rlhf_world import tiny

from experiments import reward_model
from experiments.ablations import algorithms, off_policy


def small(study):
    c = tiny()
    c.seed, c.task.eval_prompts, c.warm_start.steps = study.seed, study.eval_prompts, study.sft_steps
    return c


@pytest.fixture(autouse=True)
def small_world(monkeypatch):
    """A model of one layer, and a gold reward that its answers differ in."""
    monkeypatch.setattr(off_policy, "base_config", small)
    monkeypatch.setattr(algorithms, "base_config", small)
    by_length = lambda c, target, rollouts, *rest: np.array([float(x.response_length) for x in rollouts])  # noqa: E731
    monkeypatch.setattr(reward_model, "judge", by_length)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("off_policy")


@pytest.mark.slow
def test_the_small_form_of_off_policy_runs_and_goes_on(workdir, tmp_path):
    path = tmp_path / "o.json"
    flags = [
        "--completions=4",
        "--steps=2",
        "--sft_steps=2",
        "--pairs_prompts=6",
        "--gold_steps=2",
        "--proxy_steps=2",
        "--eval_prompts=4",
    ]
    flags += ["--algorithms=prox_rloo,online_dpo", "--seeds=1", f"--workdir={workdir}", f"--json={path}"]
    first = off_policy.main([*flags, "--minibatches=1"])["results"]["rows"]
    found = off_policy.main([*flags, "--minibatches=1,2"])["results"]
    rows = found["rows"]
    assert rows[:2] == first and [(r["algorithm"], r["N"]) for r in rows[2:]] == [("prox_rloo", 2), ("online_dpo", 2)]
    assert all(r["updates"] == 2 and 0 <= r["win_rate"] <= 1 and np.isfinite(r["kl"]) for r in rows)
    assert len({r["gold_before"] for r in rows}) == 1  # one start
    assert set(found["slopes"]) == {"prox_rloo", "online_dpo"} and (tmp_path / "o.svg").stat().st_size
    with pytest.raises(SystemExit):
        off_policy.main([*flags, "--minibatches=1,2", "--rate=1e-3"])


@pytest.mark.slow
def test_the_small_form_of_the_presets_runs_and_goes_on(workdir, tmp_path):
    path = tmp_path / "a.json"
    flags = ["--steps=2", "--sft_steps=2", "--eval_prompts=4", f"--workdir={workdir}", f"--json={path}"]
    algorithms.main([*flags, "--presets=grpo", "--seeds=1"])
    found = algorithms.main([*flags, "--presets=grpo,bon_sft", "--seeds=2"])["results"]
    assert [(r["preset"], r["seed"]) for r in found["rows"]] == [("grpo", 0), ("grpo", 1), ("bon_sft", 0), ("bon_sft", 1)]
    assert set(found["gains"]) == {"grpo", "bon_sft"} and (tmp_path / "a.svg").stat().st_size
    assert json.loads(path.read_text())["config"].get("notes") is None


def test_gains_over_seeds_and_their_table(tmp_path):
    rows = [
        dict(preset=p, seed=s, before=0.5, gain=g + 0.1 * s, learns=g > 0) for p, g in (("a", 0.1), ("b", -0.3)) for s in (0, 1)
    ]
    found = algorithms.gains(rows)
    half = 12.706204736432095 * np.std([0.1, 0.2], ddof=1) / np.sqrt(2)  # t at 97.5 % with one degree of freedom
    assert found["a"]["gain"] == pytest.approx(0.15) and found["a"]["high"] == pytest.approx(0.15 + half)
    assert found["a"]["learns"] and not found["b"]["learns"]
    assert "not in every run" in algorithms.table(rows) and "+0.150" in algorithms.table(rows)
    assert algorithms.plot(rows, tmp_path / "deep" / "a.svg").stat().st_size


@pytest.mark.parametrize(
    "study,flags,message",
    [
        (off_policy, ["--algorithms=ppo,grpo"], "--algorithms='grpo' is unknown; choose of ppo, prox_rloo"),
        (off_policy, ["--minibatches=3", "--steps=8"], "minibatches=3 must divide steps=8"),
        (algorithms, ["--presets=dapoo"], "--presets='dapoo' is unknown; choose of grpo"),
        (algorithms, ["--steps=0"], "--steps=0 must be >= 1"),
    ],
)
def test_wrong_flags_are_named_before_anything_runs(study, flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        study.main([*flags, f"--workdir={tmp_path / 'w'}"])
    assert message in capsys.readouterr().err and not (tmp_path / "w").exists()
