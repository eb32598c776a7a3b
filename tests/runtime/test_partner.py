"""Two threads that cannot wait for each other for ever."""

import threading
import time

import pytest

from adrl_jax.runtime.partner import Ended, Partner, Stalled
from adrl_jax.runtime.stop import Stop, StopRequested


def partner(work, **changes):
    made = Partner("generator", lambda: work(made), **(dict(silence_s=30.0) | changes))
    made.start()
    return made


def test_the_first_error_reaches_who_waits_within_two_seconds():
    def work(p):
        time.sleep(0.1)
        raise ZeroDivisionError("in item 3")

    p = partner(work)
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="in item 3"):
        p.attend(lambda: None, "a batch")
    assert time.monotonic() - began < 2 and p.close()
    assert not any(t.name == "generator" for t in threading.enumerate())


def test_an_end_without_what_is_waited_for_is_told():
    p = partner(lambda p: None)
    with pytest.raises(Stalled, match="the generator has ended while batch 7 was waited for"):
        p.attend(lambda: None, "batch 7")


def test_silence_is_an_error_and_a_long_wait_is_none():
    def silent(p):
        time.sleep(0.8)

    p = partner(silent, silence_s=0.3)
    with pytest.raises(Stalled, match=r"no sign of life for 0\.\d s while a batch was waited for \(limit 0.3 s\)"):
        p.attend(lambda: None, "a batch")
    p.close()

    def waits(p):
        p.wait(lambda: None)

    p = partner(waits, silence_s=0.3)
    until = time.monotonic() + 0.8
    assert p.attend(lambda: True if time.monotonic() > until else None, "a batch")
    assert p.waited == 0.0 and p.close()


def test_waiting_ends_when_asked_to_stop():
    stop = Stop()
    p = partner(lambda p: p.wait(lambda: None), check=stop.check)
    threading.Timer(0.2, stop.request).start()
    with pytest.raises(StopRequested):
        p.attend(lambda: None, "a batch")
    assert p.close()


def test_a_pause_is_at_a_breath_and_lasts():
    seen = []

    def work(p):
        for i in range(10_000):
            seen.append(i)
            time.sleep(0.002)
            p.breathe()

    p = partner(work)
    for _ in range(3):
        time.sleep(0.02)
        with p.quiet(), p.quiet():
            before = len(seen)
            time.sleep(0.05)
            assert len(seen) == before > 0
        time.sleep(0.2)
        assert len(seen) > before
    assert p.close() and p.close()
    with p.quiet():  # nobody is left to pause
        pass


def test_the_thread_is_unwound_and_handlers_of_errors_do_not_catch_it():
    state = []

    def work(p):
        try:
            while True:
                try:
                    p.breathe()
                except Exception:
                    state.append("swallowed")
        except Ended:
            state.append("unwound")
            raise

    p = partner(work)
    time.sleep(0.05)
    assert p.close() and state == ["unwound"]
    p.verify()  # being asked to end is no error


def test_values_cross_and_waits_add_up():
    box = []

    def work(p):
        for _ in range(20):
            got = p.wait(lambda: box.pop() if box else None)
            with p.cond:
                box2.append(got * 2)
                p.cond.notify_all()

    box2 = []
    p = partner(work)
    for i in range(20):
        with p.cond:
            box.append(i)
            p.cond.notify_all()
        assert p.attend(lambda: box2.pop() if box2 else None, "an answer") == 2 * i
    assert p.waited >= 0 and p.close()
