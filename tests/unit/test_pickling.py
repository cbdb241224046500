"""What cannot be pickled is named by the path that leads there."""

from __future__ import annotations

import collections
import functools
import pickle
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest

from rlpool import WorkerStartupError
from rlpool.machine import pickling
from rlpool.machine.pickling import pickled, why_not

LOCK = "a _thread.lock (TypeError: cannot pickle '_thread.lock' object)"


class Holder:
    def __init__(self, value: Any) -> None:
        self.lock = value

    def make(self) -> None:
        """A method to be bound."""


class Slotted:
    __slots__ = ("empty", "stream")

    def __init__(self, value: Any) -> None:
        self.stream = value


class SlottedChild(Slotted):
    __slots__ = ("more",)


class Pair(NamedTuple):
    first: Any
    second: Any


class Refusing:
    def __reduce__(self) -> Any:
        raise RuntimeError("a simulator\ncannot be copied")


class Making:
    """Its pickle holds what the object itself does not."""

    def __getstate__(self) -> dict[str, Any]:
        return {"numbers": [1, 2], "made": threading.Lock()}


class Unreadable(dict[str, Any]):
    """Its search must not hide the error."""

    @property
    def default_factory(self) -> Any:
        raise LookupError("nobody may ask")


def refusal(value: Any, name: str = "env_args") -> str:
    with pytest.raises(WorkerStartupError) as caught:
        pickled({name: value}, value, fix="do without")
    assert caught.value.fix == "do without"
    assert caught.value.__cause__ is not None
    return caught.value.what


def in_closure(value: Any) -> Callable[[], Any]:
    model = value
    return lambda: model


def with_default(value: Any) -> Callable[..., Any]:
    def create(a: int = 0, b: Any = value) -> Any:
        return b

    return create


def with_keyword_default(value: Any) -> Callable[..., Any]:
    def create(*, b: Any = value) -> Any:
        return b

    return create


def with_attribute(value: Any) -> Callable[..., Any]:
    def create() -> None:
        pass

    create.cache = value  # type: ignore[attr-defined]
    return create


def of_main(value: Any, source: str = "lambda: (lambda: [SHARED for _ in range(3)])") -> Any:
    """A function of a script, which travels with the globals that it uses."""
    return eval(source, {"__name__": "__main__", "SHARED": value, "unused": value})


def local_class(value: Any) -> type:
    class Local:
        handle = value

    return Local


def subclass(value: Any) -> type:
    class Derived(local_class(value)):  # type: ignore[misc]
        pass

    return Derived


SHAPES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "the whole": (lambda lock: lock, ""),
    "dict": (lambda lock: {"logger": lock}, "['logger']"),
    "dict of dicts": (lambda lock: {"a": {3: lock}}, "['a'][3]"),
    "a key": (lambda lock: {lock: 1}, ".<key <lock>>"),
    "ordered dict": (lambda lock: collections.OrderedDict(a=lock), "['a']"),
    "default dict": (
        lambda lock: collections.defaultdict(in_closure(lock)),
        ".default_factory.<closure 'model'>",
    ),
    "list": (lambda lock: [1, [2, lock]], "[1][1]"),
    "tuple": (lambda lock: (1, (2, lock)), "[1][1]"),
    "named tuple": (lambda lock: Pair(1, lock), ".second"),
    "deque": (lambda lock: collections.deque([1, lock]), "[1]"),
    "set": (lambda lock: {lock}, ".<element>"),
    "object array": (lambda lock: np.array([None, lock], object), ".flat[1]"),
    "attribute": (lambda lock: Holder(Holder(lock)), ".lock.lock"),
    "slot": (Slotted, ".stream"),
    "inherited slot": (SlottedChild, ".stream"),
    "bound method": (lambda lock: Holder(lock).make, ".__self__.lock"),
    "builtin method": (lambda lock: lock.acquire, ".__self__"),
    "closure": (lambda lock: in_closure(Holder(lock)), ".<closure 'model'>.lock"),
    "default": (with_default, ".__defaults__[1]"),
    "keyword default": (with_keyword_default, ".__kwdefaults__['b']"),
    "function attribute": (with_attribute, ".cache"),
    "partial": (lambda lock: functools.partial(Holder, 1, lock), ".args[1]"),
    "partial keyword": (lambda lock: functools.partial(Holder, value=lock), ".keywords['value']"),
    "partial function": (lambda lock: functools.partial(Holder(lock).make), ".func.__self__.lock"),
    "global of a script": (of_main, ".<global 'SHARED'>"),
    "class attribute": (local_class, ".handle"),
    "inherited class attribute": (subclass, ".__bases__[0].handle"),
    "class of an instance": (lambda lock: local_class(lock)(), ".__class__.handle"),
    "simple namespace": (lambda lock: types.SimpleNamespace(a=lock), ".a"),
    "static method": (
        lambda lock: local_class(staticmethod(in_closure(lock))),
        ".handle.__func__.<closure 'model'>",
    ),
    "property": (
        lambda lock: local_class(property(in_closure(lock))),
        ".handle.fget.<closure 'model'>",
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_path_leads_to_what_cannot_be_pickled(shape: str) -> None:
    make, path = SHAPES[shape]
    place = f"env_args{path}" if path else "it"
    assert refusal(make(threading.Lock())) == f"env_args cannot be pickled: {place} is {LOCK}"


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_shapes_with_a_number_can_be_pickled(shape: str) -> None:
    if shape == "builtin method":
        value: Any = [].append
    else:
        value = SHAPES[shape][0](in_closure(7))
    assert pickled({"env_args": value}, value, fix="") == cloudpickle.dumps(value)


def test_the_type_is_named(tmp_path: Path) -> None:
    assert refusal(n for n in "ab") == (
        "env_args cannot be pickled: it is a generator "
        "(TypeError: cannot pickle 'generator' object)"
    )
    with open(tmp_path / "log", "w") as stream:
        assert "env_args['logger'].stream is a _io.TextIOWrapper (" in refusal(
            {"logger": Slotted(stream)}
        )


def test_an_object_that_refuses_is_named_with_its_reason_in_one_line() -> None:
    assert refusal({"sim": [Refusing()]}) == (
        f"env_args cannot be pickled: env_args['sim'][0] is a {__name__}.Refusing "
        "(RuntimeError: a simulator cannot be copied)"
    )


def test_what_an_object_makes_for_its_pickle_is_told_by_the_object() -> None:
    assert refusal({"a": 1, "sim": [Making()]}) == (
        f"env_args cannot be pickled: what env_args['sim'][0] hands to the pickler has {LOCK}"
    )


def test_circles_are_no_obstacle() -> None:
    holder = Holder([threading.Lock()])
    holder.me = holder  # type: ignore[attr-defined]
    holder.lock.insert(0, [holder, holder.lock])
    assert refusal(holder) == f"env_args cannot be pickled: env_args.lock[1] is {LOCK}"


def test_of_several_parts_the_one_that_fails_is_named() -> None:
    parts = {"create_env": Holder, "env_args": {"a": 1}, "create_agent": in_closure([Refusing()])}
    with pytest.raises(WorkerStartupError) as caught:
        pickled(parts, tuple(parts.values()), fix="")
    assert caught.value.what.startswith(
        "create_agent cannot be pickled: create_agent.<closure 'model'>[0] is a "
    )


def test_a_part_may_go_by_another_name() -> None:
    with pytest.raises(WorkerStartupError, match=r"environment 3 cannot .*: env\[3\].lock is a"):
        pickled({"env[3]": Holder(threading.Lock())}, [Refusing()], fix="", what="environment 3")


def test_a_failure_that_does_not_come_again_is_reported_as_it_came() -> None:
    words = why_not({"a": 1, "b": 2}, TypeError("it was\nthe weather"))
    assert words == "a, b cannot be pickled: TypeError: it was the weather"


def test_another_pickler_fails_at_other_things() -> None:
    value = {"task": [lambda: 0]}
    assert cloudpickle.dumps(value)
    with pytest.raises(Exception, match="pickle") as caught:
        pickle.dumps(value)
    assert why_not({"data": value}, caught.value, kind=pickle.Pickler).startswith(
        "data cannot be pickled: data['task'][0] is a function ("
    )


def test_the_search_never_hides_the_error() -> None:
    assert refusal(Unreadable(a=1, b=threading.Lock())).endswith(LOCK)
    # What lies beyond the part that cannot be looked at is not found, but the type is.
    value = Unreadable()
    value.lost = threading.Lock()  # type: ignore[attr-defined]
    assert "_thread.lock" in refusal([value])


def test_long_reasons_are_cut() -> None:
    words = why_not({"a": 1}, TypeError("x" * 1000))
    assert 250 < len(words) < 350


def test_deep_nesting_ends_the_search_not_the_process() -> None:
    nested: list[Any] = []
    for _ in range(10 * sys.getrecursionlimit()):
        nested = [nested]
    words = refusal(nested)
    assert "recursion" in words
    assert len(words) < 400


def test_a_path_that_is_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    value: Any = threading.Lock()
    for _ in range(6):
        value = [value]
    assert refusal(value) == f"env_args cannot be pickled: env_args{'[0]' * 6} is {LOCK}"
    monkeypatch.setattr(pickling, "_DEPTH", 5)
    assert refusal(value) == (
        f"env_args cannot be pickled: what env_args{'[0]' * 5} hands to the pickler has {LOCK}"
    )


def test_large_values_are_searched_quickly() -> None:
    value = {"data": [float(n) for n in range(10**6)], "lock": threading.Lock()}
    assert "env_args['lock'] is" in refusal(value)


def test_importable_functions_are_no_way_to_a_culprit() -> None:
    """Pickled by name, they hold nothing; the path leads through what does."""
    module = types.ModuleType("importable_for_a_test")
    lock = threading.Lock()
    exec("def use(): return LOCK", vars(module))
    module.LOCK = lock  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        value = {"f": module.use, "z": [[[lock]]]}  # type: ignore[attr-defined]
        assert "env_args['z'][0][0][0] is" in refusal(value)
    finally:
        del sys.modules[module.__name__]
