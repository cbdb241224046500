"""Which keyword arguments functions take, and whole numbers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from rlpool.errors import SpecError
from rlpool.machine.arguments import called_with_seed, takes_keyword, takes_position, whole_number


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
