"""A rollout over two devices: the same tokens, and drafter steps on the idle device alone."""

import time

import jax
import numpy as np
import pytest

from adrl_jax.bandit.fixed import fixed
from adrl_jax.drafter.buffer import DataBuffer, Sample
from adrl_jax.drafter.loss import DrafterLossConfig
from adrl_jax.drafter.trainer import DrafterTrainer, Heads, TrainerConfig
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import engine_layout, init_params
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.runtime.groups import EngineGroup, Grouped, deal
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import Prompt, Request, SamplingParams

TINY = ModelConfig("llama", 41, 16, 32, 1, 2, 1, 8, max_positions=512)
DRAFTER = Eagle(TINY)
SETTINGS = EngineConfig(
    seed=2,
    eos_ids=(),
    strategies=(OFF, Strategy("eagle", 2)),
    max_batch=2,
    batch_buckets=(2,),
    cache_bucket=256,
    rounds_per_launch=8,
)
PARAMS = jax.tree.map(lambda x: x * 6 if x.ndim == 2 else x, init_params(TINY, jax.random.key(0)))
OWN = DRAFTER.init_params(jax.random.key(1))
# Group 0 gets prompts 0 and 2, group 1 the others: a long tail on device 0.
REQUESTS = [Request(Prompt(i, np.arange(2, 5 + i)), 0, s, i, (200, 4, 180, 3)[i]) for i in range(4) for s in range(2)]


def drafting(count):
    bandit = fixed(1, 2)
    return Grouped(bandit, count) if count > 1 else bandit


@pytest.fixture(scope="module")
def world():
    """One engine, and two with a trainer in their tails; both on the first two of the test's devices."""
    alone = Engine(TINY, SETTINGS, {"eagle": DRAFTER})
    served = engine_layout(PARAMS, TINY)
    alone.publish(served, 0, {"eagle": engine_layout(OWN, TINY)})
    devices = jax.devices()[:2]
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3))
    buffer, heads = DataBuffer(1 << 24, 256), Heads()
    trainer = DrafterTrainer(TINY, DrafterLossConfig(), optimizer, buffer, heads, TrainerConfig(rows=1), device=devices[0])
    used = []

    def train(group):
        made = trainer.try_step(devices[group])
        if made:
            used.append({d for x in jax.tree.leaves(trainer._state.trained) for d in x.devices()})
        return made

    group = EngineGroup([Engine(TINY, SETTINGS, {"eagle": DRAFTER}) for _ in devices], devices, train)
    group.publish(served, 0, {"eagle": engine_layout(OWN, TINY)})
    heads.add(0, served)
    return alone, group, trainer, used, optimizer.init(OWN)


def test_tokens_are_the_same_and_the_idle_device_alone_trains(world):
    alone, group, trainer, used, opt_state = world
    bandit = drafting(1)
    one = alone.generate(REQUESTS, SamplingParams(1.0), bandit, bandit.init())
    trainer.buffer.begin_step(0)
    group.collect = lambda rollout, hidden: trainer.buffer.add(Sample(rollout, hidden, 0, 0))
    for turn in range(2):  # the first has nothing compiled, and does not begin to in its tail
        used.clear()
        trainer.load(OWN, opt_state, 0)
        trainer.prepare(group.devices)
        # A tail of many slow launches on group 0, however fast the machine is; group 1 needs one or two.
        slowed = {"on_launch": lambda _: time.sleep(0.05)}
        two = group.generate(REQUESTS, SamplingParams(1.0), drafting(2), drafting(2).init(), **slowed)
        trained = trainer.unload()
        log = group.spot.wait()
        if turn == 0:
            assert not log.steps and trained.version == 0 and len(trainer.buffer) == len(REQUESTS)
    for a, b in zip(one.rollouts, two.rollouts, strict=True):
        assert (a.prompt_id, a.sample) == (b.prompt_id, b.sample)
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)
    assert log.steps and {s.group for s in log.steps} == {1} and log.finished[1] < log.finished[0]
    assert all(s.start >= log.finished[1] for s in log.steps) and all(s.end <= log.over for s in log.steps[:-1])
    assert used and all(d == {jax.devices()[1]} for d in used)
    assert trained.version >= len(log.steps) - 1 > 0
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(trained.params), jax.tree.leaves(OWN), strict=True))
    assert len(two.bandit_state) == 2
    assert sum(x.tokens for x in two.stats.launches) == sum(r.response_length for r in two.rollouts) == two.stats.tokens
    # Nobody trains without a drafter loaded: evaluations leave it alone.
    group.collect = None
    plain = fixed(0, 2)
    again = group.generate(REQUESTS, SamplingParams(1.0), plain, plain.init())
    assert group.spot.wait().steps == () and len(again.rollouts) == len(REQUESTS)
    np.testing.assert_array_equal(again.rollouts[0].token_ids, one.rollouts[0].token_ids)


def test_siblings_stay_together_and_an_empty_share_is_no_fault(world):
    shares = deal(REQUESTS, 3)
    assert sorted(i for share in shares for i in share) == list(range(8)) and shares == [[0, 1, 6, 7], [2, 3], [4, 5]]
    _, group, *_ = world
    few = REQUESTS[2:4]
    plain = fixed(0, 2)
    found = group.generate(few, SamplingParams(1.0), plain, plain.init())
    assert [r.prompt_id for r in found.rollouts] == [1, 1]


def test_what_belongs_to_one_engine_is_refused(world):
    _, group, *_ = world
    plain = fixed(0, 2)
    with pytest.raises(ValueError, match="several device groups"):
        group.generate(REQUESTS, SamplingParams(1.0), plain, plain.init(), replay_arms=[0])
    with pytest.raises(ValueError, match="a device each"):
        EngineGroup(group.engines, [jax.devices()[0]] * 2)

    def broken(launch):
        raise RuntimeError("asked to stop")

    with pytest.raises(RuntimeError, match="asked to stop"):
        group.generate(REQUESTS, SamplingParams(1.0), plain, plain.init(), on_launch=broken)


@pytest.fixture(params=["one", "group"])
def engine(request, world):
    """Either engine, behind the interface that the loop knows."""
    found = world[request.param == "group"]
    found.collect = None
    yield found
    found.collect = None


def test_the_interface_is_whole(world):
    alone, group, *_ = world
    public = {name for name in {*dir(alone), *vars(alone)} if not name.startswith("_")}
    assert public <= set(dir(group))
    assert (group.version, group.drafter_version) == (alone.version, alone.drafter_version) == (0, 0)
    assert group.config == alone.config and group.model_config == alone.model_config and group.drafters == alone.drafters


def test_another_seed_is_every_engines(world):
    group, seed = world[1], world[1].config.seed
    group.reseed(seed + 1)
    assert {e.config.seed for e in group.engines} == {seed + 1}
    group.reseed(seed)
    assert {e.config.seed for e in group.engines} == {seed}


def test_a_call_may_be_made_first_and_run_later(engine, world):
    bandit = drafting(2) if engine is world[1] else drafting(1)
    seen = []
    engine.collect = lambda rollout, hidden: seen.append((rollout.prompt_id, rollout.sample, hidden.shape))
    serving = engine.serving(REQUESTS[2:4], SamplingParams(1.0), bandit, bandit.init(), expected_tokens=[4.0, 4.0])
    assert seen == [] and jax.tree.structure(serving.bandit_state) == jax.tree.structure(bandit.init())
    launches = []
    found = serving.run()
    assert [(r.prompt_id, r.sample, r.response_length) for r in found.rollouts] == [(1, 0, 4), (1, 1, 4)]
    assert sorted(seen) == [(1, s, (len(found.rollouts[s].token_ids) - 1, 16)) for s in range(2)]
    assert found.stats.tokens == 8 and len(found.stats.launches) > 0
    same = engine.generate(REQUESTS[2:4], SamplingParams(1.0), bandit, bandit.init(), on_launch=launches.append)
    assert len(launches) == len(same.stats.launches)
    for a, b in zip(found.rollouts, same.rollouts, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)


def test_what_cannot_be_served_is_refused_before_anything_is_compiled(engine, world):
    plain, law = fixed(0, 2), SamplingParams(1.0)
    programs = engine.programs if isinstance(engine.programs, tuple) else (engine.programs,)
    before = [len(p) for p in programs]
    longer = Request(Prompt(9, np.arange(2, 5)), 0, 0, 9, 1000)
    foreign = Request(Prompt(9, np.array([2, 41])), 0, 0, 9, 4)
    for request, words in ((longer, "512"), (foreign, "41")):
        for ask in (engine.check, lambda r: engine.serving(r, law, plain, plain.init())):
            with pytest.raises(ValueError, match=words):
                ask([*REQUESTS[:2], request])
    with pytest.raises(TypeError, match="unknown arguments: speed"):
        engine.serving(REQUESTS[:2], law, plain, plain.init(), speed=2)
    with pytest.raises(ValueError, match="version=-1 must be >= 0"):
        engine.publish(engine.params, -1, {"eagle": OWN})
    with pytest.raises(ValueError, match="needs parameters"):
        engine.publish_drafter({}, 3)
    assert [len(p) for p in programs] == before and (engine.version, engine.drafter_version) == (0, 0)
    fresh = Engine(TINY, SETTINGS, {"eagle": DRAFTER})
    unpublished = EngineGroup([fresh], jax.devices()[:1]) if engine is world[1] else fresh
    with pytest.raises(ValueError, match="call publish first"):
        unpublished.generate(REQUESTS[:2], law, plain, plain.init())


def test_another_drafter_changes_no_token(engine, world):
    bandit = drafting(2) if engine is world[1] else drafting(1)

    def tokens():
        return [r.token_ids for r in engine.generate(REQUESTS[2:4], SamplingParams(1.0), bandit, bandit.init()).rollouts]

    before = tokens()
    try:
        engine.publish_drafter({"eagle": engine_layout(DRAFTER.init_params(jax.random.key(7)), TINY)}, 5)
        assert (engine.version, engine.drafter_version) == (0, 5)
        for a, b in zip(before, tokens(), strict=True):
            np.testing.assert_array_equal(a, b)
    finally:
        engine.publish_drafter({"eagle": engine_layout(OWN, TINY)}, 0)
