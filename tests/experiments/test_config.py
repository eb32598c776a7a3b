"""Settings: one declaration a field, and no way past it."""

import dataclasses

import pytest

from experiments import config, flags, rules, schema
from experiments.schema import ConfigError

FILE = """
from experiments import config

def get_config(arg="0"):
    c = config.get_config()
    c.seed = int(arg)
    {line}
    return c
"""


@pytest.fixture
def config_file(tmp_path):
    def write(line="pass"):
        path = tmp_path / "experiment.py"
        path.write_text(FILE.format(line=line))
        return path

    return write


def parse(path, *args):
    return flags.parse(["train", f"--config={path}", "--workdir=w", *args], config.Config)


def test_defaults_are_legal_and_the_saved_config_reloads_equal(tmp_path):
    c = config.get_config()
    c.rollout.strategies = ("off", "eagle-d3")
    c.learner.learning_rate = 3e-7
    frozen = config.freeze(c)
    config.save(frozen, tmp_path / "config.json")
    again = config.load(tmp_path / "config.json")
    assert again == frozen and hash(again) == hash(frozen)
    assert config.freeze(again) is again


def test_every_field_is_a_flag(config_file):
    path = config_file()
    for name, opt in schema.options(config.Config).items():
        value = {bool: "true", str: "x", int: "7", float: "0.25"}[opt.element]
        value = str(opt.choices[-1]) if opt.choices else value
        if opt.element is not str and opt.low is not None and not opt.low <= float(value if value != "true" else 1):
            value = str(opt.low)
        got, _ = parse(path, f"--config.{name}={value}")
        node = got
        for part in name.split("."):
            node = getattr(node, part)
        expected = opt.element(value) if opt.element is not bool else True
        assert node == ((expected,) if opt.is_tuple else expected)


def test_flags_override_the_file_and_files_take_an_argument(config_file):
    path = config_file("c.learner.learning_rate = 2e-4")
    got, other = parse(f"{path}:9", "--config.learner.learning_rate=1e-5", "--noconfig.log.report")
    assert got.learner.learning_rate == 1e-5 and got.seed == 9 and got.log.report is False and other == {"workdir": "w"}
    assert parse(path)[0].learner.learning_rate == 2e-4


def test_a_file_may_set_a_few_fields_in_a_plain_dict(config_file):
    got, _ = parse(config_file("return {'train': {'steps': 3}}"), "--config.seed=5")
    assert (got.train.steps, got.seed) == (3, 5) and got.learner == config.Learner()


def test_tuples_and_whole_numbers_on_the_command_line(config_file):
    got, _ = parse(
        config_file(),
        "--config.rollout.strategies=off,eagle-d4",
        "--config.rollout.batch_buckets=4,64",
        "--config.learner.learning_rate=1",
    )
    assert got.rollout.strategies == ("off", "eagle-d4") and got.rollout.batch_buckets == (4, 64)
    assert got.learner.learning_rate == 1.0 and type(got.learner.learning_rate) is float


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--config.learner.learning_rat=1"], ["learner.learning_rat is not a field", "learner.learning_rate"]),
        (["--config.learner=1"], ["learner is a group", "learner.clip_low"]),
        (["--config.lerner.beta1=1"], ["lerner.beta1 is not a field", "learner.beta1"]),
        (["--config.train.steps=1e3"], ["train.steps='1e3'", "int", ">= 0"]),
        (["--config.train.steps=-1"], ["train.steps=-1", ">= 0"]),
        (["--config.train.prompts_per_step=0"], ["train.prompts_per_step=0", ">= 1"]),
        (["--config.learner.learning_rate=nan"], ["learner.learning_rate=nan", "> 0"]),
        (["--config.learner.learning_rate=fast"], ["learner.learning_rate='fast'", "float"]),
        (["--config.learner.remat=maybe"], ["learner.remat='maybe'", "True or False"]),
        (["--config.learner.remat", "False"], ["left-over argument 'False'"]),
        (["config.seed=3"], ["left-over argument 'config.seed=3'", "--config.seed=3"]),
        (["--seed=3"], ["unknown flag --seed", "--workdir"]),
        (["--config.bandit.name=ucb9"], ["bandit.name='ucb9'", "beg", "fixed"]),
        (["--config.seed"], ["seed"]),
        (["--config.rollout.batch_buckets=0,4"], ["rollout.batch_buckets=(0, 4)", ">= 1"]),
        (["--config.rollout.batch_buckets='a'"], ["rollout.batch_buckets=", "int"]),
        (["--config.rollout.strategies=3"], ["rollout.strategies=", "(str, …)"]),
    ],
)
def test_wrong_arguments_name_field_value_and_legal_choices(config_file, args, words):
    with pytest.raises(ConfigError) as error:
        parse(config_file(), *args)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('c.learner.learning_rate = "1e-6"', ["experiment.py:7", "learner.learning_rate", "float", "> 0"]),
        ("c.learner.lr = 1e-6", ["experiment.py:7", "learner.lr is not a field", "learner.learning_rate"]),
        ("c.train.steps = True", ["train.steps=True", "int"]),
        ("c.train.steps = None", ["train.steps=None", "int"]),
        ("c.train.steps = 2.5", ["train.steps", "int"]),
        ("return None", ["get_config() must return a ConfigDict"]),
        ("return {'train': {'step': 3}}", ["train.step is not a field", "train.steps"]),
        ("return {0: 3}", ["0 is not a field"]),
    ],
)
def test_wrong_values_in_a_file_name_the_place(config_file, line, words):
    with pytest.raises(ConfigError) as error:
        parse(config_file(line))
    for word in words:
        assert word in str(error.value)


def test_missing_files_and_flags(tmp_path, config_file):
    with pytest.raises(ConfigError, match="no such file"):
        parse(tmp_path / "absent.py")
    with pytest.raises(ConfigError, match="--config=FILE is missing"):
        flags.parse(["train", "--workdir=w"], config.Config)
    with pytest.raises(ConfigError, match="--workdir is missing"):
        flags.parse(["train", f"--config={config_file()}"], config.Config)


def frozen(**changes):
    c = config.get_config()
    for path, value in changes.items():
        group, _, name = path.partition("__")
        if name:
            c[group][name] = value
        else:
            c[group] = value
    return config.freeze(c)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(train__group_size=1), ["train.group_size=1", "at least 2", "grpo"]),
        (dict(sampling__top_k=5), ["sampling.top_k=5", "evaluation.top_k is free"]),
        (dict(sampling__top_p=0.9), ["sampling.top_p=0.9"]),
        (dict(sampling__min_p=0.1), ["sampling.min_p=0.1"]),
        (dict(learner__minibatches=3), ["learner.minibatches=3", "divide train.prompts_per_step=8"]),
        (dict(train__max_new_tokens=2000), ["train.max_new_tokens=2000", "positions", "at most"]),
        (dict(learner__row_length=100), ["learner.row_length=100", "task.max_prompt_tokens"]),
        (dict(model__num_kv_heads=3), ["model.num_kv_heads=3", "divide model.num_heads=4"]),
        (dict(model__head_dim=33), ["model.head_dim=33", "even"]),
        (dict(rollout__strategies=("eagle-d4",)), ["off must be among them"]),
        (dict(rollout__strategies=("off", "eagle")), ["rollout.strategies='eagle'", "<drafter>-d<depth>"]),
        (dict(rollout__strategies=("off", "eagle-d0")), ["rollout.strategies='eagle-d0'"]),
        (dict(rollout__strategies=("off", "medusa-d4")), ["medusa-d4", "ngram, history, eagle, merged, model"]),
        (dict(rollout__strategies=("off", "ngram-d3-w2-v6")), ["ngram-d3-w2-v6", "trees are drafted by eagle"]),
        (dict(rollout__strategies=("off", "eagle-d3-w2-v3")), ["eagle-d3-w2-v3", "verify_tokens=3"]),
        (dict(rollout__strategies=("off", "eagle-d3-w2")), ["eagle-d3-w2", "verify tokens"]),
        (dict(rollout__prefill_chunk=40), ["rollout.prefill_chunk=40", "rollout.prefill_bucket=32"]),
        (dict(rollout__admission="random"), ["rollout.admission='random'", "longest_first"]),
        (dict(sampling__reuse_noise_across_epochs=True), ["sampling.reuse_noise_across_epochs=True", "history"]),
        (dict(drafter__history_min=9), ["drafter.history_min=9", "drafter.history_max=8"]),
        (dict(drafter__merged_min_match=9), ["drafter.merged_min_match=9", "drafter.history_max=8"]),
        (
            dict(drafter__path="d", rollout__strategies=("off", "ngram-d2"), bandit__thresholds=()),
            ["drafter.path='d'", "`eagle` or `merged` arm"],
        ),
        (dict(rollout__strategies=("off", "off")), ["each arm once"]),
        (dict(rollout__strategies=("off", "model-d2")), ["drafter.model=''", "model"]),
        (dict(drafter__model="smollm2"), ["drafter.model='smollm2'"]),
        (dict(rollout__batch_buckets=(8, 4)), ["rollout.batch_buckets=(8, 4)", "ascend"]),
        (dict(rollout__batch_buckets=(4, 8)), ["rollout.max_batch=64"]),
        (dict(rollout__replay_arms="/nowhere/arms.jsonl"), ["rollout.replay_arms='/nowhere/arms.jsonl'", "no such file"]),
        (dict(bandit__arm="eagle-d9"), ["bandit.arm='eagle-d9'", "off"]),
        (dict(bandit__thresholds=(1, 4)), ["bandit.thresholds=(1, 4)", "3 distinct depths"]),
        (dict(task__name="gsm8k"), ["task.path=''", "gsm8k"]),
        (dict(task__path="x.jsonl"), ["task.path='x.jsonl'", "leave it empty"]),
        (dict(train__prompts_per_step=4096), ["train.prompts_per_step=4096", "task.train_prompts"]),
        (dict(drafter__ngram_min=9), ["drafter.ngram_min=9", "drafter.ngram_max=3"]),
    ],
)
def test_rules_between_fields(changes, words):
    with pytest.raises(ConfigError) as error:
        frozen(**changes)
    for word in words:
        assert word in str(error.value)


def test_filters_are_free_in_evaluation():
    c = frozen(evaluation__top_k=5, evaluation__top_p=0.5, evaluation__min_p=0.1, evaluation__temperature=0.0)
    assert c.evaluation.top_k == 5


def test_derived_values_follow_what_they_are_derived_from():
    c = frozen(rollout__max_batch=24, rollout__strategies=("off", "eagle-d2", "ngram-d2", "eagle-d5"))
    assert rules.batch_buckets(c) == (1, 2, 4, 8, 16, 24)
    assert rules.thresholds(c) == (1, 3)
    assert rules.batch_buckets(frozen(rollout__max_batch=1)) == (1,)


def test_help_lists_every_field_with_type_range_default_and_meaning():
    text = flags.usage("experiments.train", config.Config)
    for name, opt in schema.options(config.Config).items():
        assert f"--config.{name}={schema.format_value(opt.default)}\n      {opt.type_name}, {opt.legal}. {opt.meaning}" in text
    assert flags.wants_help(["train", "--help"]) and not flags.wants_help(["train", "--config=help"])


def test_every_field_is_documented_and_its_default_legal():
    for opt in schema.options(config.Config).values():
        assert len(opt.meaning) > 8 and opt.check(opt.default) == opt.default


def test_differences_and_unsupported_types():
    a, b = config.freeze(config.get_config()), frozen(train__steps=7)
    assert schema.differences(a, b) == [("train.steps", a.train.steps, 7)] and schema.differences(a, a) == []

    @dataclasses.dataclass(frozen=True)
    class Odd:
        field: bytes = schema.option(b"", "not text")

    with pytest.raises(TypeError, match="field has the unsupported type"):
        schema.options(Odd)
