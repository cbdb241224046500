"""Which keyword arguments functions take, numbers and choices."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from rlpool.errors import SpecError
from rlpool.machine.arguments import (
    called_with_seed,
    check_choice,
    checked_timeout,
    real_number,
    takes_keyword,
    takes_position,
    whole_number,
)


def takes(seed: Any = None, n: int = 1) -> Any:
    return seed, n


def takes_none(n: int = 1) -> Any:
    return "none", n


def handing_on(function: Any) -> Any:
    @functools.wraps(function)
    def outer(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return outer


class Maker:
    @handing_on
    def __init__(self, n: int = 1) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter(("none", self.n))

    __call__ = staticmethod(handing_on(takes_none))

    def method(self, seed: Any) -> Any:
        return seed, 1


@pytest.mark.parametrize(
    ("create", "is_seeded"),
    [
        (takes, True),
        (takes_none, False),
        (lambda n=1, **others: (others["seed"], n), True),
        (lambda *, seed: (seed, 1), True),
        (functools.partial(takes, seed=8), True),
        (functools.partial(takes, 8), False),
        (functools.partial(handing_on(takes_none), n=1), False),
        (Maker, False),
        (Maker(), False),
        (Maker().method, True),
        (handing_on(takes), True),
        (handing_on(handing_on(takes_none)), False),
        (functools.wraps(takes)(lambda: takes()), False),
    ],
)
def test_a_factory_gets_a_seed_if_it_takes_one(create: Any, is_seeded: bool) -> None:
    assert takes_keyword(create, "seed") == is_seeded
    if is_seeded:  # one among the arguments comes first
        assert called_with_seed(create, 5, {"seed": 9})[0] == 9
    first, n = called_with_seed(create, 5, {})
    assert n == 1
    assert (first == 5) == is_seeded


def test_what_has_no_signature_may_take_anything() -> None:
    assert takes_keyword(dict, "seed")
    assert not takes_keyword(dict, "seed", otherwise=False)
    assert takes_position(type)
    assert not takes_position(lambda *, seed: seed)


def test_whole_numbers_may_be_of_every_library_but_no_bools_fractions_or_arrays() -> None:
    for value in (3, np.int32(3), np.array(3), torch.tensor(3)):
        number = whole_number("n", value, 1)
        assert (number, type(number)) == (3, int)
    for wrong in (0, True, 3.0, "3", None, np.array([3]), torch.tensor([3]), torch.tensor(3.5)):
        with pytest.raises(SpecError, match=r"n should be an int of at least 1, got"):
            whole_number("n", wrong, 1)


@pytest.mark.parametrize("scalar", [1, 1.0, np.float32(1), np.int64(1), torch.tensor(1.0)])
def test_numbers_may_be_scalars_of_every_library(scalar: Any) -> None:
    for limits in ("above 0", "from 0 to 1", "from 0 on, and finite"):
        number = real_number("x", scalar, limits)
        assert (number, type(number)) == (1.0, float)
    assert checked_timeout(scalar) == 1.0


@pytest.mark.parametrize(
    "value", [True, np.True_, "1", None, np.ones(2), torch.ones(1), 1j, np.nan]
)
def test_flags_texts_and_arrays_are_no_numbers(value: Any) -> None:
    with pytest.raises(SpecError, match="x should be a number from 0 to 1, got"):
        real_number("x", value, "from 0 to 1")


@pytest.mark.parametrize(
    ("limits", "refused"),
    [
        ("above 0", (0, -1, -np.inf, 10**400)),
        ("from 0 to 1", (-0.1, 1.1, np.inf)),
        ("from 0 on, and finite", (-0.1, np.inf)),
    ],
)
def test_numbers_outside_their_limits_are_refused(limits: str, refused: tuple[float, ...]) -> None:
    for value in refused:
        with pytest.raises(SpecError, match=f"x should be a number {limits}, got"):
            real_number("x", value, limits)


def test_a_timeout_may_be_none_or_endless_but_not_zero() -> None:
    assert checked_timeout(None) is None
    assert checked_timeout(np.inf) == np.inf
    with pytest.raises(SpecError, match="timeout should be a number above 0"):
        checked_timeout(0)


@pytest.mark.parametrize("value", ["c", 1, None, True, np.array(["a"]), ["a"], torch.ones(2)])
def test_what_is_none_of_the_choices_is_refused(value: Any) -> None:
    with pytest.raises(SpecError, match="mode should be 'a' or 'b', got"):
        check_choice("mode", value, ("a", "b"))


def test_flags_of_numpy_are_flags() -> None:
    check_choice("flag", np.True_, (True, False))
    with pytest.raises(SpecError, match="flag should be True or False, got 1"):
        check_choice("flag", 1, (True, False))
