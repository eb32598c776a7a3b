"""Peer `tunix`: one global step of google-tunix's GRPOLearner, float32, forced lengths; each request runs one step.

Config: `model` (Hugging Face folder), `prompts` (lists of token ids), `group`, `new_tokens`, `temperature`,
`learning_rate`. Answers `seconds`, `generate_s`, `update_s`.
"""

import itertools
import time

import jax
import numpy as np
import optax
import protocol
import tunix_model
from flax import nnx
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout


def script(channel: protocol.Channel, config: dict) -> None:
    model, mesh, _, facts = tunix_model.load(config["model"])
    prompts, new_tokens = config["prompts"], config["new_tokens"]
    width = tunix_model.round_up(max(map(len, prompts)))
    role = rl_cluster.Role
    cluster = rl_cluster.RLCluster(
        actor=model,
        reference=None,
        tokenizer=tunix_model.IdTokenizer(pad=0, eos=-1),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(config.get("learning_rate", 1e-6)),
                eval_every_n_steps=10**9,
                max_steps=10**6,
                mini_batch_size=len(prompts),
                train_micro_batch_size=len(prompts),
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=new_tokens,
                max_prompt_length=width,
                kv_cache_size=width + new_tokens,
                temperature=config.get("temperature", 1.0),
                top_p=1.0,
                top_k=None,
                eos_tokens=[-1],
            ),
        ),
    )

    def reward(prompts, completions, **_):
        return [(sum(map(int, text.split())) % 17) / 17.0 for text in completions]  # differs within a group

    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        algo_config=grpo_learner.GRPOConfig(num_generations=config["group"], num_iterations=1, beta=0.0, epsilon=0.2),
        reward_fns=reward,
    )
    spent = {}

    def wait_for_update() -> None:
        jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))

    def timed(name: str, call):
        def timed_call(*args, **kwargs):
            start = time.perf_counter()
            out = call(*args, **kwargs)
            if name == "update":
                wait_for_update()
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - start
            return out

        return timed_call

    cluster.generate = timed("generate", cluster.generate)
    cluster.update_actor = timed("update", cluster.update_actor)
    global_step = learner._run_global_step

    def step_on_request(*args, **kwargs):
        if channel.receive() is None:
            raise StopIteration  # ends the learner's loop
        spent.clear()
        start = time.perf_counter()
        global_step(*args, **kwargs)
        wait_for_update()
        seconds = time.perf_counter() - start
        channel.answer({"seconds": seconds, "generate_s": spent["generate"], "update_s": spent["update"]})

    learner._run_global_step = step_on_request
    batch = {"prompts": np.array([tunix_model.text(prompt) for prompt in prompts])}
    channel.ready(facts)
    with mesh:
        learner.train(itertools.repeat(batch))


if __name__ == "__main__":
    protocol.main(script)
