"""Unpicklable objects are named by argument, path and type."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from rlpool import SpecError, WorkerStartupError
from rlpool.machine.pickling import why_not
from rlpool.workers.sharing import ByValue, pickled

LOCK = "a _thread.lock"


class Holder:
    def __init__(self, value: Any) -> None:
        self.lock = value


class Refusing:
    def __reduce__(self) -> Any:
        raise RuntimeError("a simulator\ncannot be copied")


def refusal(value: Any) -> str:
    with pytest.raises(WorkerStartupError) as caught:
        pickled({"env_args": value}, value, fix="do without")
    assert caught.value.fix == "do without"
    assert caught.value.__cause__ is not None
    return caught.value.what


def closure(value: Any) -> Callable[[], Any]:
    model = value
    return lambda: model


def function_of_script(value: Any) -> Any:
    """Return a function of a script, which is sent with the globals it uses."""
    return eval("lambda: SHARED", {"__name__": "__main__", "SHARED": value, "unused": value})


def local_class(value: Any) -> type:
    class Local:
        handle = value

    return Local


SHAPES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda lock: {"a": {3: lock}}, "['a'][3]"),
    (lambda lock: [1, (2, lock)], "[1][1]"),
    (lambda lock: closure(Holder(lock)), ".<closure 'model'>.lock"),
    (lambda lock: functools.partial(Holder, value=lock), ".keywords['value']"),
    (function_of_script, ".<global 'SHARED'>"),
    (local_class, ".handle"),
]


@pytest.mark.parametrize(("make", "path"), SHAPES)
def test_the_path_leads_to_the_unpicklable_object(make: Any, path: str) -> None:
    assert f": env_args{path} is {LOCK}" in refusal(make(threading.Lock()))
    value = make(closure(7))
    assert pickled({"env_args": value}, value, fix="").load() is not None


def test_type_and_reason_are_given_in_one_line_even_without_a_path() -> None:
    assert "it is a set" in refusal({threading.Lock()})
    assert refusal({"sim": [Refusing()]}).endswith(
        f"env_args['sim'][0] is a {__name__}.Refusing (RuntimeError: a simulator cannot be copied)"
    )


def test_reference_cycles_and_deep_nesting_are_handled() -> None:
    holder = Holder([threading.Lock()])
    holder.lock.insert(0, holder)
    assert "env_args.lock[1]" in refusal(holder)
    nested: list[Any] = []
    for _ in range(1_000_000):  # deeper than any stack
        nested = [nested]
    words = refusal(nested)
    assert "recursion" in words
    assert len(words) < 400


def test_the_failing_part_of_several_is_named() -> None:
    parts = {"create_env": Holder, "env_args": {"a": 1}, "create_agent": closure([Refusing()])}
    with pytest.raises(WorkerStartupError, match=r"^create_agent .*: create_agent\.<closure 'm"):
        pickled(parts, tuple(parts.values()), fix="")
    with pytest.raises(WorkerStartupError, match=r"environment 3 cannot .*: env\[3\].lock is a"):
        pickled({"env[3]": Holder(threading.Lock())}, [Refusing()], fix="", label="environment 3")
    words = why_not({"a": 1, "b": 2}, TypeError("it was\nthe weather"))
    assert words.endswith("it was the weather")


def test_data_for_a_worker_arrives_unchanged_with_the_classes_of_its_functions() -> None:
    @dataclass
    class Local:
        number: int

    value = [Local(3), lambda: 4]
    sent = ByValue("task", value)
    value.append(5)
    arrived = pickle.loads(pickle.dumps({"data": sent}))["data"]
    assert (arrived[0], arrived[1](), len(arrived)) == (Local(3), 4, 2)
    with pytest.raises(SpecError, match=r"^task cannot be pickled: task\[1\]\.lock is"):
        ByValue("task", [0, Holder(threading.Lock())])
