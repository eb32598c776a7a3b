import json

from experiments import figures

ROLLOUT = {
    "spec_tokens_per_s_16": 400.0,
    "plain_tokens_per_s_16": 300.0,
    "hf_tokens_per_s_16": 126.0,
    "tunix_tokens_per_s_16": None,
}
SUMMARY = {"running": [[0.0, 8], [1.0, 2], [2.0, 0]], "running_off": [[0.0, 8], [3.0, 0]]}


def test_pictures_show_the_measured_numbers(tmp_path):
    (tmp_path / "rollout.json").write_text(json.dumps({"results": ROLLOUT}))
    (tmp_path / "quickstart.json").write_text(json.dumps(SUMMARY))
    rows = [{"phase": "train", "step": s, "reward/mean": s / 10} for s in range(5)] + [
        {"phase": "evaluate", "step": 0, "reward/mean": 0.1}
    ]
    (tmp_path / "quickstart.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with figures.matplotlib.rc_context(figures.STYLE):
        written = {path.stem: path.read_text() for path in figures.draw(tmp_path, tmp_path / "out")}
    assert set(written) == {"rollout", "quickstart"}
    assert all(number in written["rollout"] for number in (">400<", ">300<", ">126<"))
    assert "Hugging Face" in written["rollout"] and "Tunix" not in written["rollout"]
    assert all(text in written["quickstart"] for text in ("with speculation", "without speculation", "held-out prompts"))


LONGTAIL = {
    "goodput_s": 8.5,
    "beg_s": 9.5,
    "best_fixed_arm": "eagle-d3",
    "best_fixed_s": 9.25,
    "plain_s": 11.5,
    "hf_s": 77.5,
    "llamacpp_s": None,
    "goodput_arms": {"off": 0.25, "eagle-d3": 0.75, "eagle-d6": 0.0},
}
CELLS = [
    {"batch": b, "arm": arm, "tokens_per_s": speed * b, "accept_length": 2.0}
    for b in (1, 2)
    for arm, speed in (("off", 10.0), ("eagle-d3", 13.0), ("goodput", 14.0))
]


def test_the_long_tail_and_the_grid(tmp_path):
    (tmp_path / "longtail.json").write_text(json.dumps({"results": LONGTAIL}))
    (tmp_path / "grid.json").write_text(json.dumps({"results": {"cells": CELLS}}))
    with figures.matplotlib.rc_context(figures.STYLE):
        written = {path.stem: path.read_text() for path in figures.draw(tmp_path, tmp_path / "out")}
    assert all(text in written["longtail"] for text in (">8.5<", ">11.5<", "best fixed (eagle-d3)", ">77.5<", ">75 %<"))
    assert not any(text in written["longtail"] for text in ("llama.cpp", "eagle-d6"))
    assert all(text in written["grid"] for text in (">goodput<", ">eagle-d3<", ">off<"))


def test_nothing_is_drawn_from_nothing(tmp_path):
    assert figures.draw(tmp_path, tmp_path) == []
