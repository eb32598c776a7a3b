import os
import threading
import time

import pytest

from adrl_jax.rewards.pool import ScorerPool
from adrl_jax.types import Score


def calls(*responses):
    return [(None, response, False) for response in responses]


def test_scores_come_in_order_from_several_workers(misbehaving):
    with ScorerPool(misbehaving.obeys, workers=2) as pool:
        scores = pool.score(calls(*"abcdefghij"))
        workers = {s.extracted for s in pool.score(calls(*["where"] * 40))}
    assert [s.extracted for s in scores] == list("abcdefghij")
    assert len(workers) == 2
    assert pool.counts == {"calls": 50}


def test_a_hanging_scorer_is_killed_and_counted_and_the_next_20_are_served(misbehaving):
    with ScorerPool(misbehaving.obeys, timeout_s=0.5) as pool:
        pool.score(calls("warm"))
        start = time.monotonic()
        scores = pool.score(calls("hang", *["fine"] * 20))
        assert scores[0] == Score(0.0, None, "timeout", detail="no score within 0.5 s")
        assert [s.value for s in scores[1:]] == [1.0] * 20
        assert time.monotonic() - start < 30
        assert pool.counts["timeout"] == 1 and pool.counts["restart"] == 1


def test_a_scorer_that_hangs_inside_c_code_is_killed_too(misbehaving):
    with ScorerPool(misbehaving.obeys, timeout_s=0.5) as pool:
        assert [s.reason for s in pool.score(calls("hang in C", "fine"))] == ["timeout", "match"]


def test_works_off_the_main_thread_with_several_threads(misbehaving):
    results = {}
    with ScorerPool(misbehaving.obeys, timeout_s=0.5) as pool:

        def work(name):
            results[name] = pool.score(calls(name, "hang", name))

        threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    for name in "ab":
        assert [(s.extracted, s.reason) for s in results[name]] == [(name, "match"), (None, "timeout"), (name, "match")]


def test_the_scorers_own_exception_ends_the_batch(misbehaving):
    with ScorerPool(misbehaving.obeys) as pool:
        with pytest.raises(KeyError, match="no such answer") as caught:
            pool.score(calls("fine", "raise", "fine"))
        assert "in obeys" in caught.value.__notes__[0], "the worker's traceback is lost"
        assert pool.score(calls("still", "alive"))[1].extracted == "alive"


def test_an_exception_that_cannot_travel_is_quoted(misbehaving):
    with ScorerPool(misbehaving.obeys) as pool, pytest.raises(RuntimeError, match="Odd: 1 and 2"):
        pool.score(calls("raise odd"))


def test_exceptions_are_worth_zero_and_counted_where_so_configured(misbehaving):
    with ScorerPool(misbehaving.obeys, on_error="zero") as pool:
        scores = pool.score(calls("raise", "die", "number", "fine"))
        assert [s.reason for s in scores] == ["error", "error", "error", "match"]
        assert [s.value for s in scores] == [0.0, 0.0, 0.0, 1.0]
        assert "no such answer" in scores[0].detail
        assert "exit code 7" in scores[1].detail
        assert "returned float, not a Score" in scores[2].detail
        assert pool.counts == {"calls": 4, "error": 3, "restart": 1}


def test_a_worker_that_dies_ends_the_batch_by_default(misbehaving):
    with ScorerPool(misbehaving.obeys) as pool, pytest.raises(RuntimeError, match="exit code 7"):
        pool.score(calls("die"))


def test_no_calls_need_no_worker(misbehaving):
    with ScorerPool(misbehaving.obeys) as pool:
        assert pool.score([]) == []


def test_a_closed_pool_refuses_and_leaves_no_process(misbehaving):
    pool = ScorerPool(misbehaving.obeys)
    pid = int(pool.score(calls("where"))[0].extracted)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.score(calls("fine"))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    "field, value", [("workers", 0), ("timeout_s", 0.0), ("timeout_s", float("nan")), ("on_error", "ignore")]
)
def test_senseless_settings_are_errors(misbehaving, field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        ScorerPool(misbehaving.obeys, **{field: value})


def test_a_scorer_of_main_is_refused(misbehaving, monkeypatch):
    monkeypatch.setattr(misbehaving.obeys, "__module__", "__main__")
    with pytest.raises(ValueError, match="__main__"):
        ScorerPool(misbehaving.obeys)


def test_a_scorer_that_cannot_be_imported_is_an_error(misbehaving, monkeypatch, capfd):
    pool = ScorerPool(misbehaving.obeys)
    monkeypatch.undo()  # its folder is no longer on the path
    with pool, pytest.raises(RuntimeError, match="did not start"):
        pool.score(calls("fine"))
    assert "misbehaving_scorers" in capfd.readouterr().err
