"""A bar where there is a terminal, plain lines where there is none."""

import io

from adrl_jax.runtime import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_log_gets_plain_lines_and_always_the_last(monkeypatch):
    stream = io.StringIO()
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = progress.Progress("train", 5, 1, stream)
    for k in range(2, 6):
        now[0] += 4.0
        bar.show(arm="off")
        bar.step(reward=k / 10)
    bar.note("a note")
    bar.close()
    lines = stream.getvalue().splitlines()
    assert [line.split("] ")[1] for line in lines[:-1]] == ["train 4/5  arm off  reward 0.4", "train 5/5  arm off  reward 0.5"]
    assert lines[-1] == "a note"


def test_a_terminal_gets_a_bar_with_figures():
    stream = Terminal()
    bar = progress.Progress("train", 2, 0, stream)
    bar.show(arm="eagle-d4", running=7)
    bar.step(reward=0.5, **{"tokens/s": 1234.5})
    bar.note("held out: 0.4")
    bar.step(reward=0.6)
    bar.close()
    text = stream.getvalue()
    assert "arm eagle-d4  running 7" in text and "tokens/s 1234" in text and "2/2" in text and "held out: 0.4" in text


def test_figures_in_words():
    assert progress.describe({"a": 0.12345, "b": 1234.5, "c": None, "d_e": "x", "f": 3}) == "a 0.123  b 1234  d e x  f 3"
