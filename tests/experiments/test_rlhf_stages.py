"""From worked examples to a policy, from its answers to a reward model, and from that to RL: each stage takes what the one before wrote."""

import dataclasses
import json

import numpy as np
import pytest
from rlhf_world import tiny

from adrl_jax.rewards import reward_model as models
from adrl_jax.runtime import loop
from experiments import build, config, evaluate, presets, resolve, reward_config, reward_model, schema, sft
from experiments.ablations import off_policy
from experiments.schema import ConfigError


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Folders of a policy and of a reward model on it that likes long answers."""
    root = tmp_path_factory.mktemp("rlhf")
    (root / "sft").mkdir()
    record = sft.run(config.freeze(tiny()), root / "sft")
    started = sft.of_source(config.freeze(tiny()), root / "sft")
    r = reward_config.get_config()
    r.preferences.prompts, r.preferences.samples, r.preferences.max_new_tokens, r.preferences.max_batch = 6, 3, 20, 4
    r.training.steps, r.training.batch_pairs, r.training.microbatch_rows = 2, 4, 4
    frozen = dataclasses.replace(schema.build(reward_config.RewardConfig, r), task=started.task, model=started.model)
    reward_config.check(frozen)
    (root / "proxy").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        by_length = lambda c, target, rollouts, *rest: np.array([float(x.response_length) for x in rollouts])  # noqa: E731
        patch.setattr(reward_model, "judge", by_length)
        judged = reward_model.run(frozen, root / "proxy")
    return root, record, judged, started


def test_supervised_training_writes_a_policy_that_a_run_can_start_from(stages):
    root, record, _, started = stages
    assert record["perplexity_after"] < record["perplexity_before"]
    assert json.loads((root / "sft" / "sft.json").read_text()) == record
    first, again = (build.policy(started, None) for _ in range(2))
    assert first.config.hidden_size == 16 and first.tokenizer.fingerprint() == again.tokenizer.fingerprint()


def test_a_reward_model_comes_with_accuracy_and_calibration(stages):
    root, _, judged, _ = stages
    assert {"accuracy", "log_loss", "brier", "ece", "train_pairs", "held_out_pairs"} <= judged.keys()
    assert models.load(root / "proxy").record == json.loads((root / "proxy" / "reward_model.json").read_text())


def test_training_on_the_proxy_is_evaluated_by_the_task_and_against_the_start(stages, tmp_path):
    root, _, _, started = stages
    c = schema.editable(started)
    c.task.reward_model = str(root / "proxy")
    presets.apply(c, "online_dpo")
    c.evaluation.samples = 2
    settings = config.freeze(c)
    with build.opened(settings) as parts:
        limits = resolve.loop_config(settings)
        assert loop.run(parts, limits, tmp_path).status == "done"
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        trained = [r for r in rows if r["phase"] == "train"]
        assert all(np.isfinite(r["reward/reward_model"]) for r in trained) and "reference/k1" in trained[-1]
        result, scored = evaluate.of_checkpoint(parts, limits, tmp_path)
        assert set(scored.rewards) <= {0.0, 1.0}  # the task's own score
        found = evaluate.passes(parts, limits, scored) | evaluate.against(parts, limits, scored, str(root / "sft" / "policy"))
    assert {"pass@1_greedy", "pass@1", "pass@2", "win_rate", "kl_to_reference"} <= found.keys()
    assert 0 <= found["win_rate"]["low"] <= found["win_rate"]["value"] <= found["win_rate"]["high"] <= 1
    assert found["perplexity_under_reference"] > 1 and result["step"] == 2


def test_pairs_come_from_best_and_worst_and_ties_make_none(stages):
    class Answer:
        def __init__(self, n):
            self.token_ids, self.prompt_length, self.response_ids = np.arange(n + 1), 1, np.arange(n)

    answers = [Answer(n) for n in (3, 1, 2, 5, 5, 5)]
    pairs, ties = reward_model.make_pairs(answers, np.array([0, 2, 1, 1, 1, 1.0]), 3)
    assert ties == 1 and len(pairs) == 1
    assert (len(pairs[0][1]), len(pairs[0][2])) == (1, 3)


def test_what_is_wrong_is_named(stages, tmp_path, capsys):
    _, _, _, started = stages
    r = reward_config.get_config()
    r.preferences.prompts = 4096
    with pytest.raises(ConfigError, match=r"preferences.prompts=4096.*task.train_prompts=2048"):
        reward_config.check(schema.build(reward_config.RewardConfig, r))
    missing = dataclasses.replace(started, task=dataclasses.replace(started.task, reward_model=str(tmp_path)))
    with pytest.raises(FileNotFoundError, match=r"experiments.reward_model writes it"), build.opened(missing):
        pass
    with pytest.raises(SystemExit):
        off_policy.main(["--workdir=w", "--minibatches=3", "--steps=8"])
    assert "minibatches=3 must divide steps=8" in capsys.readouterr().err


def test_slopes_and_table_of_the_ablation():
    rows = [
        {"algorithm": a, "N": n, "seed": s, "win_rate": 0.8 - k * np.log2(n) + 0.001 * s, "kl": 1.0}
        for a, k in (("ppo", 0.05), ("online_dpo", 0.01))
        for n in (1, 2, 4)
        for s in range(3)
    ]
    found = off_policy.slopes(rows)
    assert found["ppo"]["slope"] == pytest.approx(-0.05) and found["online_dpo"]["slope"] == pytest.approx(-0.01)
    assert found["ppo"]["low"] <= found["ppo"]["slope"] <= found["ppo"]["high"] < found["online_dpo"]["low"]
    assert "0.801 (1.00)" in off_policy.table(rows)
    assert off_policy.slopes(rows[:3]) == {}
