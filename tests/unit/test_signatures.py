"""Which keyword arguments functions take."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from rlpool.signatures import called_with_seed, takes_keyword


def takes(seed: Any = None, n: int = 1) -> Any:
    return seed, n


def takes_none(n: int = 1) -> Any:
    return "none", n


def takes_all(n: int = 1, **others: Any) -> Any:
    return others.get("seed", "none"), n


def handing_on(function: Any) -> Any:
    @functools.wraps(function)
    def outer(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return outer


def without_arguments(function: Any) -> Any:
    @functools.wraps(function)
    def outer() -> Any:
        return function()

    return outer


class Maker:
    def __init__(self, seed: Any = None, n: int = 1) -> None:
        self.made = seed, n

    def __iter__(self) -> Any:
        return iter(self.made)

    def __call__(self, n: int = 1) -> Any:
        return "none", n

    def method(self, seed: Any) -> Any:
        return seed, 1

    @handing_on
    def decorated(self, n: int = 1) -> Any:
        return "none", n


class Decorated:
    @handing_on
    def __init__(self, n: int = 1) -> None:
        self.made = "none", n

    def __iter__(self) -> Any:
        return iter(self.made)

    @handing_on
    def __call__(self, n: int = 1) -> Any:
        return "none", n


CALLABLES = [
    (takes, True),
    (takes_none, False),
    (takes_all, True),
    (lambda: ("none", 1), False),
    (lambda seed: (seed, 1), True),
    (lambda **named: (named["seed"], 1), True),
    (lambda *, seed: (seed, 1), True),
    (functools.partial(takes, n=1), True),
    (functools.partial(takes, seed=8), True),
    (functools.partial(takes, 8), False),
    (functools.partial(takes_none, n=1), False),
    (functools.partial(handing_on(takes_none), n=1), False),
    (Maker, True),
    (Maker(), False),
    (Maker().method, True),
    (Maker().decorated, False),
    (Decorated, False),
    (Decorated(), False),
    (handing_on(takes), True),
    (handing_on(takes_none), False),
    (handing_on(handing_on(takes_none)), False),
    (handing_on(takes_all), True),
    (without_arguments(takes), False),
    (without_arguments(takes_none), False),
]


@pytest.mark.parametrize(("create", "is_seeded"), CALLABLES)
def test_a_factory_gets_a_seed_if_it_takes_one(create: Any, is_seeded: bool) -> None:
    assert takes_keyword(create, "seed") == is_seeded
    first, n = called_with_seed(create, 5, {})
    assert n == 1
    assert (first == 5) == is_seeded


@pytest.mark.parametrize("create", [dict, type, int])
def test_what_has_no_signature_may_take_anything(create: Any) -> None:
    assert takes_keyword(create, "seed")
    assert not takes_keyword(create, "seed", otherwise=False)


def test_a_seed_among_the_arguments_comes_first() -> None:
    assert called_with_seed(takes, 5, {"seed": 9}) == (9, 1)
    with pytest.raises(TypeError, match="seed"):
        called_with_seed(takes_none, 5, {"seed": 9})
