"""kernels.implementation: from the settings to the engine and the learner, refused where it cannot run."""

import pytest

from experiments import build, config, resolve, rules
from experiments.schema import ConfigError


def settings(**changes):
    c = config.get_config()
    c.task.train_prompts, c.task.eval_prompts, c.task.max_prompt_tokens, c.task.reward_workers = 20, 4, 6, 0
    c.model.num_layers, c.model.hidden_size, c.model.intermediate_size = 1, 16, 32
    c.train.max_new_tokens = 104
    c.update_from_flattened_dict(changes)
    return config.freeze(c)


def built(**changes):
    with build.opened(settings(**changes)) as parts:
        return parts


@pytest.mark.parametrize("asked, runs", {"auto": "xla", "xla": "xla", "interpret": "interpret"}.items())
def test_the_engine_and_the_learner_take_it(asked, runs):
    c = settings(**{"kernels.implementation": asked})
    assert resolve.engine_config(c, (1,), 16).kernels == rules.learner_kernels(c) == asked
    assert built(**{"kernels.implementation": asked}).engine.config.kernels == runs


def test_what_cannot_run_is_refused():
    with pytest.raises(
        ConfigError, match=r"kernels.implementation='triton'.*one of auto, xla, pallas_tpu, pallas_gpu, interpret"
    ):
        settings(**{"kernels.implementation": "triton"})
    for name, machine in (("pallas_tpu", "TPU"), ("pallas_gpu", "GPU")):
        with pytest.raises(ConfigError, match=f"kernels.implementation='{name}' needs a {machine}, and JAX runs on cpu"):
            built(**{"kernels.implementation": name})
    with pytest.raises(ConfigError, match=r"kernels.implementation='interpret'.*auto or xla with learner.devices=2"):
        settings(**{"kernels.implementation": "interpret", "learner.devices": 2})
    assert rules.learner_kernels(settings(**{"learner.devices": 2})) == "xla"
