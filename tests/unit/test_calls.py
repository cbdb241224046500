"""``CrashOnly``: which calls leave an object interrupted, and which are refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rlpool import SpecError, UsageError
from rlpool.machine.calls import CrashOnly, whole

from support.striking import Alarm, Strike, alarms


class Owner(CrashOnly):
    n_done = 0

    @whole
    def run(self, do: Callable[[], Any] = lambda: None) -> Any:
        result = do()
        self.n_done += 1
        return result


def raising(error: BaseException) -> Callable[[], Any]:
    def do() -> None:
        raise error

    return do


def test_only_what_is_not_an_error_of_ours_interrupts() -> None:
    owner = Owner()
    assert owner.run(lambda: 3) == 3
    with pytest.raises(SpecError):
        owner.run(raising(SpecError("no")))
    with pytest.raises(TypeError):
        owner.run(1, 2, 3)  # type: ignore[call-arg]
    assert not owner.is_interrupted
    for error in (KeyboardInterrupt(), ZeroDivisionError()):
        with pytest.raises(type(error)):
            owner.run(raising(error))
        assert owner.is_interrupted
        owner.run()
        assert owner.is_interrupted
        owner.is_interrupted = False


def test_a_call_inside_another_is_refused_in_whatever_thread() -> None:
    owner, caught = Owner(), []

    def call() -> None:
        try:
            owner.run()
        except UsageError as error:
            caught.append(str(error))

    def call_in_thread() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    owner.run(call)
    owner.run(call_in_thread)
    assert owner.n_done == 2
    assert ["Owner.run()" in text for text in caught] == [True, True]
    call_in_thread()
    assert owner.n_done == 3
    assert not owner.is_interrupted


def test_a_signal_leaves_an_object_interrupted_or_comes_before_the_call() -> None:
    n_struck = 0
    with alarms():
        for number in range(1000):
            owner = Owner()
            strike = Strike(number, files=["calls"])
            try:
                with strike:
                    owner.run()
            except Alarm:
                n_struck += 1
                assert owner.is_interrupted or not owner.n_done
            if not strike.has_struck:
                break
            owner.run()
            assert not owner.is_interrupted or owner.n_done
    assert n_struck >= 2
