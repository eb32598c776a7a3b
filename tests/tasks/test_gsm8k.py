import os
import pathlib

import pytest

from adrl_jax.models.tokenizer import CharTokenizer
from adrl_jax.tasks.gsm8k import Gsm8k, find_source, read_hub

RECORDS = [
    '{"question": "Two and three?", "answer": "2+3=<<2+3=5>>5\\n#### 5"}',
    '{"question": "How much?", "answer": "200000-130000=<<200000-130000=70000>>70,000\\n#### 70,000"}',
]


@pytest.fixture
def tokenizer():
    return CharTokenizer("".join(chr(i) for i in range(32, 127)) + "\n")


def folder(tmp_path, lines, split="train"):
    (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    return str(tmp_path)


def test_references_are_final_numbers(tmp_path, tokenizer):
    task = Gsm8k(folder(tmp_path, RECORDS), chat=False).encode(tokenizer)
    prompts = task.prompts("train")
    assert [p.reference for p in prompts] == ["5", "70,000"]
    assert [p.prompt_id for p in prompts] == [0, 1]
    assert prompts[0].text.startswith("Solve the problem") and prompts[0].text.endswith("Two and three?\n")
    assert task.score(prompts[1], "so it is 70,000", False).value == 1.0
    assert task.score(prompts[1], "so it is 200000", False).reason == "mismatch"


def test_chat_template_is_applied(tmp_path):
    tokenizer = CharTokenizer(
        "".join(chr(i) for i in range(32, 127)) + "\n",
        chat_template="{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]",
    )
    task = Gsm8k(folder(tmp_path, RECORDS), instruction="").encode(tokenizer)
    assert task.prompts("train")[0].text == "[user]Two and three?[assistant]"


def test_mode_is_the_users_choice(tmp_path, tokenizer):
    data = folder(tmp_path, RECORDS)
    for mode, value in (("strict", 0.0), ("flexible", 1.0)):
        task = Gsm8k(data, chat=False, mode=mode).encode(tokenizer)
        assert task.score(task.prompts("train")[0], r"\boxed{5}", False).value == value
    with pytest.raises(ValueError, match="mode='any'"):
        Gsm8k(data, mode="any")


def test_a_record_without_answer_names_line_and_field(tmp_path, tokenizer):
    task = Gsm8k(folder(tmp_path, [RECORDS[0], '{"question": "?"}'])).encode(tokenizer)
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2: field 'answer' is missing"):
        task.prompts("train")


def test_answers_without_a_number_are_left_out_with_a_warning(tmp_path, tokenizer):
    lines = [RECORDS[0], '{"question": "?", "answer": "#### n/a"}', '{"question": "?", "answer": "5"}']
    task = Gsm8k(folder(tmp_path, lines), chat=False).encode(tokenizer)
    with pytest.warns(UserWarning, match=r"no number behind '####' in 2 of 3 records: 2, 3"):
        assert len(task.prompts("train")) == 1
    with pytest.raises(ValueError, match="in 1 of 1 records"):
        Gsm8k(folder(tmp_path, lines[1:2])).encode(tokenizer).prompts("train")


def test_sources(tmp_path):
    path = pathlib.Path(folder(tmp_path, RECORDS)) / "train.jsonl"
    assert find_source(str(tmp_path), "train") == path
    assert find_source(str(path), "test") == path
    assert find_source("openai/gsm8k", "train") is None
    with pytest.raises(ValueError, match=r"no file for split 'test': test\.jsonl"):
        find_source(str(tmp_path), "test")
    for missing in (str(tmp_path / "none"), "data/none.jsonl", "./none", "none", "a/b/c"):
        with pytest.raises(ValueError, match="does not exist"):
            find_source(missing, "train")
    with pytest.raises(ValueError, match=r"Gsm8k\.data is empty"):
        Gsm8k("")


def test_without_the_hubs_client_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        read_hub("openai/gsm8k", "main", "train")


def test_an_unreachable_hub_is_a_clear_error(monkeypatch):
    import types

    def load_dataset(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setitem(__import__("sys").modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ConnectionError, match=r"openai/gsm8k.*no route to host.*name a \.jsonl"):
        read_hub("openai/gsm8k", "main", "train")


def test_hub_records_are_checked_too(monkeypatch):
    import types

    rows = [{"question": "?", "answer": "#### 1"}, {"question": "?"}]
    monkeypatch.setitem(__import__("sys").modules, "datasets", types.SimpleNamespace(load_dataset=lambda *a, **k: rows))
    with pytest.raises(ValueError, match="row 2: field 'answer'"):
        read_hub("openai/gsm8k", "main", "train")


def test_real_records(tokenizer):
    if "ADRL_DATA" not in os.environ:
        pytest.skip("ADRL_DATA is not set: no folder with real records")
    task = Gsm8k(os.path.join(os.environ["ADRL_DATA"], "gsm8k"), chat=False)
    everything = "".join(
        sorted({c for split in task.splits for r in task._load(split) for c in r["question"]} | set(task.instruction))
    )
    task = task.encode(CharTokenizer(everything + "\n" if "\n" not in everything else everything))
    assert [len(task.prompts(split)) for split in task.splits] == [7473, 1319]
    assert task.prompts("test")[0].reference == "18"
