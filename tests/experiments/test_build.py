"""Putting a run together: what the settings become."""

import dataclasses

import jax
import numpy as np
import pytest

from adrl_jax.learner.optimizer import OPTIMIZERS
from adrl_jax.speculation.strategy import Strategy
from experiments import build, config, learner_rules, learners, resolve, rules


def settings(**changes):
    c = config.get_config()
    c.task.train_prompts, c.task.eval_prompts, c.task.max_prompt_tokens, c.task.reward_workers = 20, 4, 6, 0
    c.model.num_layers, c.model.hidden_size, c.model.intermediate_size = 1, 16, 32
    c.train.max_new_tokens = 104
    c.update_from_flattened_dict(changes)
    return config.freeze(c)


def opened(c):
    with build.opened(c) as parts:
        return parts


def test_settings_become_the_rooms_own_records():
    c = settings(**{"rollout.strategies": ("off", "eagle-d3"), "learner.aggregation": "constant", "learner.clip_high": 0.28})
    engine = resolve.engine_config(c, (1,), 16)
    assert engine.strategies == (Strategy("none", 0), Strategy("eagle", 3)) and engine.valid_vocab == 16
    loss = learner_rules.loss_config(c)
    assert (loss.clip_high, loss.constant_length) == (0.28, 104)
    assert resolve.optimizer_config(c).b2 == c.learner.beta2 and resolve.loop_config(c).seed == c.seed
    for name in OPTIMIZERS:
        drafter = resolve.drafter_optimizer_config(settings(**{"drafter.optimizer": name, "drafter.learning_rate": 6e-3}))
        assert (drafter.name, drafter.learning_rate) == (name, 6e-3)
    assert resolve.drafter_loss_config(settings(**{"rollout.strategies": ("off", "ngram-d2")})) is None
    assert rules.thresholds(c) == (1,)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "gpt_neox"])
def test_every_family_can_be_embedded(family):
    kv = 4 if family == "gpt_neox" else 2
    c = settings(**{"model.family": family, "model.num_kv_heads": kv})
    parts = opened(c)
    params = parts.init_learner().params
    assert parts.model_config.family == family and params["embedding"].shape == (16, 16)


def test_fresh_weights_repeat_and_have_the_asked_spread():
    wide = settings(**{"model.hidden_size": 64, "model.init_std": 0.08, "seed": 3})
    first, again = (opened(wide).init_learner().params for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert float(first["layer_0"]["mlp"]["gate_up"]["kernel"].std()) == pytest.approx(0.08, rel=0.05)
    assert float(first["layer_0"]["input_norm"]["weight"][0]) == 1.0
    other = opened(dataclasses.replace(wide, seed=4)).init_learner().params
    assert not np.array_equal(first["embedding"], other["embedding"])


def test_worked_examples_come_once_an_epoch_and_end_with_the_end_token():
    c = settings(**{"warm_start.steps": 4, "warm_start.batch_size": 4, "warm_start.examples": 8, "learner.layout": "plain"})
    parts = opened(c)

    def texts(step):
        batch = parts.warm_batch(step)
        found = []
        for row, mask, owner in zip(batch.target_ids, batch.target_mask, batch.rollout_index):
            for i in np.unique(owner[mask]):
                ids = row[mask][owner[mask] == i]
                assert ids[-1] == parts.tokenizer.eos_ids[0]
                found.append(parts.tokenizer.decode(ids))
        return found

    first, second = texts(0) + texts(1), texts(2) + texts(3)
    assert sorted(first) == sorted(second) and first != second and texts(0) == texts(0)


def test_row_lengths_and_costs():
    assert learners.row_lengths(60) == (64, 96, 128, 192, 256)
    assert learners.row_lengths(100)[0] == 128
    cost = learners.cost_model(opened(settings()).model_config)
    assert cost.seconds(2, 128, 64) < cost.seconds(2, 128, 128) < cost.seconds(4, 128, 128)
    assert cost.seconds(1, 256, 64) > cost.seconds(2, 128, 32)


def test_identity_names_model_task_and_seed():
    a, b = opened(settings()).identity, opened(settings(**{"model.hidden_size": 32, "seed": 5})).identity
    assert {k for k in a if a[k] != b[k]} == {"model.hidden_size", "seed"}
