"""Algorithms by name: every preset is a legal run, and is what its paper says."""

from pathlib import Path

import pytest

from adrl_jax.learner.update import data_mesh
from experiments import build, config, flags, learner_rules, learners, presets, resolve, schema
from experiments.config import Config
from experiments.learner_config import Learner
from experiments.schema import ConfigError

CONFIGS = Path(__file__).parents[2] / "experiments" / "configs"


def of(name, **fields):
    settings, _ = flags.parse(["train", f"--config={CONFIGS / 'quickstart.py'}:{name}", "--workdir=w"], Config)
    c = schema.editable(settings)
    c.rollout.strategies = ("off",)
    c.update_from_flattened_dict(fields)
    return config.freeze(c)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_is_a_legal_run_that_can_be_put_together(name):
    c = of(name)
    loss = learner_rules.loss_config(c)
    assert resolve.experience_config(c).loss == loss
    _, fields, others = presets.PRESETS[name]
    known = schema.options(Config)
    assert all(f"learner.{field}" in known for field in fields) and all(field in known for field in others)
    for field, value in fields.items():
        assert getattr(c.learner, field) == value
    target = build.policy(c, build.ALPHABETS["division"])
    learning = learners.build(c, target, None, data_mesh(1))  # nothing is compiled
    assert callable(learning.update) and learning.prepare.config.loss == loss


def test_the_default_is_grpo_and_what_it_always_was():
    c, plain = of("grpo"), config.freeze(config.get_config())
    assert c.learner.surrogate == plain.learner.surrogate == "ppo_clip"
    assert learner_rules.loss_config(plain) == learner_rules.loss_config(c)
    assert learner_rules.loss_config(c).clip_low == 0.2 and not learner_rules.needs_reference(c)


def test_named_algorithms_are_what_they_say():
    assert learner_rules.loss_config(of("dapo")).clip_high == 0.28 and of("dapo").learner.max_refills > 0
    assert learner_rules.loss_config(of("dr_grpo")).constant_length == of("dr_grpo").train.max_new_tokens
    assert learner_rules.loss_config(of("gspo")).parts.level == "sequence"
    assert learner_rules.loss_config(of("cispo")).clip_low == 1.0  # no lower bound
    assert learner_rules.loss_config(of("vcpo")).weight_high == 8.0 and of("vcpo").learner.ess_base == 1.0
    assert learner_rules.needs_reference(of("online_dpo")) and learner_rules.needs_reference(of("ppo"))
    assert not learner_rules.needs_reference(of("bon_sft"))


def test_the_papers_conventions_and_their_switches():
    for name in ("paper_ppo", "paper_prox_rloo", "paper_online_dpo", "paper_bon_sft"):
        c = of(name)
        x = c.learner
        assert (x.schedule, x.schedule_unit, x.eos_rule, x.eos_penalty, x.max_grad_norm) == (
            "linear",
            "batch",
            "replace",
            1.0,
            0,
        )
        assert c.sampling.temperature == 0.7 and c.train.group_size == (1 if name == "paper_ppo" else 2)
        sound = of(
            name, **{"learner.schedule_unit": "update", "learner.eos_rule": "subtract", "learner.episode_unit": "completion"}
        )
        assert resolve.optimizer_config(sound).steps_per_unit == 1
    # 16 episodes an update: 16 prompts of two completions for DPO, 8 for RLOO.
    assert learner_rules.prompts_per_step(of("paper_online_dpo")) == 16
    assert learner_rules.prompts_per_step(of("paper_prox_rloo")) == 8
    assert learner_rules.prompts_per_step(of("paper_prox_rloo", **{"learner.minibatches": 4})) == 32
    assert resolve.loop_config(of("paper_prox_rloo")).prompts_per_step == 8
    many = of("paper_ppo", **{"learner.minibatches": 8})
    assert resolve.optimizer_config(many).steps_per_unit == 8 and many.learner.old_log_probs == "recompute"


def test_an_unknown_preset_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"preset='dapoo' is unknown; did you mean dapo\?"):
        presets.apply(config.get_config(), "dapoo")


def test_flags_win_over_the_preset():
    path = f"--config={CONFIGS / 'quickstart.py'}:dapo"
    settings, _ = flags.parse(["train", path, "--workdir=w", "--config.learner.clip_high=0.5"], Config)
    assert settings.learner.clip_high == 0.5 and settings.learner.max_refills > 0


# Combinations that are refused, and words of the message: both fields.
ILLEGAL = [
    (dict(weight="token"), ["learner.weight='token'", "learner.old_log_probs='behaviour'", "twice"]),
    (dict(surrogate="gspo"), ["learner.aggregation='token'", "learner.surrogate='gspo'"]),
    (dict(surrogate="online_dpo", aggregation="group"), ["learner.advantage='grpo'", "learner.surrogate='online_dpo'", "none"]),
    (dict(advantage="none"), ["learner.advantage='none'", "learner.surrogate='ppo_clip'"]),
    (dict(surrogate="topr", advantage="gae"), ["learner.advantage='gae'", "learner.surrogate='topr'"]),
    (dict(gamma=0.9), ["learner.gamma=0.9", "learner.advantage='grpo'"]),
    (dict(value_clip=0.5), ["learner.value_clip=0.5", "learner.advantage='grpo'"]),
    (dict(ties="first"), ["learner.ties='first'", "learner.surrogate='ppo_clip'"]),
    (dict(schedule_unit="batch"), ["learner.schedule_unit='batch'", "learner.schedule='constant'"]),
    (dict(optimizer="adafactor", beta1=0.8), ["learner.beta1=0.8", "learner.optimizer='adafactor'"]),
    (dict(lora_alpha=3.0), ["learner.lora_alpha=3.0", "learner.lora_rank=0"]),
    (dict(eos_penalty=1.0), ["learner.eos_penalty=1.0", "learner.eos_rule='none'"]),
    (dict(eos_rule="replace"), ["learner.eos_penalty=0.0", "learner.eos_rule='replace'"]),
    (dict(overlong_penalty=1.0), ["learner.overlong_margin=0", "learner.overlong_penalty=1.0"]),
    (dict(kl_in="reward"), ["learner.kl_in='reward'", "learner.kl_coef=0.0"]),
    (dict(kl_coef=0.1, kl_in="reward", kl_correction=True), ["learner.kl_correction=True", "learner.kl_in='reward'"]),
    (dict(kl_coef=0.1, kl_estimator="k1"), ["learner.kl_estimator='k1'", "learner.kl_correction=False"]),
    (dict(kl_estimator="k2"), ["learner.kl_estimator='k2'", "learner.kl_coef=0.0"]),
    (dict(reference_every=5), ["learner.reference_every=5", "learner.kl_coef=0.0"]),
    (dict(episode_unit="completion"), ["learner.episode_unit='completion'", "learner.episodes=0"]),
    (dict(episodes=3, episode_unit="completion"), ["learner.episodes=3", "train.group_size=8"]),
    (
        dict(drop_truncated=True, eos_rule="replace", eos_penalty=1.0),
        ["learner.eos_rule='replace'", "learner.drop_truncated=True"],
    ),
    (dict(advantage="gae", max_refills=2), ["learner.max_refills=2", "learner.advantage='gae'"]),
    (dict(lora_rank=4), ["learner.lora_rank=4", "warm_start.steps=1000"]),
    (dict(aggregation="group"), ["learner.row_length=112", "learner.aggregation='group'"]),
    (dict(clip_low=0.1, surrogate="reinforce"), ["learner.clip_low=0.1", "learner.surrogate='reinforce'"]),
    (dict(mask="opsm", mask_high=3.0), ["learner.mask_high=3.0", "learner.mask='opsm'"]),
]


@pytest.mark.parametrize("fields,words", ILLEGAL)
def test_what_does_not_go_together_is_refused_and_both_fields_named(fields, words):
    with pytest.raises(ConfigError) as error:
        of("grpo", **{f"learner.{name}": value for name, value in fields.items()})
    for word in words:
        assert word in str(error.value)


def test_one_response_a_prompt_needs_a_value_model():
    assert of("ppo", **{"train.group_size": 1}).train.group_size == 1
    with pytest.raises(ConfigError, match=r"train.group_size=1 is not legal: learner.advantage=grpo"):
        of("grpo", **{"train.group_size": 1})


@pytest.mark.parametrize("mode", ["lagged", "overlap", "in_flight"])
@pytest.mark.parametrize("old", ["recompute", "interpolate"])
def test_stale_data_with_recomputed_log_probs_need_a_weight(mode, old):
    unweighted = {"learner.weight": "none", "learner.weight_high": 2.0, "learner.old_log_probs": old}
    fresh = of("decoupled_ppo", **unweighted)
    assert not learner_rules.stale(fresh) and not learner_rules.corrected(fresh)
    for leave in (False, True):  # leave to learn uncorrected does not cover a ratio that pretends to correct
        with pytest.raises(
            ConfigError, match=rf"learner.old_log_probs='{old}' is not legal with learner.weight='none'.*{mode}"
        ):
            of("decoupled_ppo", **unweighted, **{"runtime.mode": mode, "runtime.allow_uncorrected": leave})
    for name in ("grpo", "tis_grpo", "decoupled_ppo"):
        assert learner_rules.corrected(of(name, **{"runtime.mode": mode}))


def test_every_field_of_the_learner_is_documented():
    assert all(len(o.meaning) > 8 for o in schema.options(Learner).values())
