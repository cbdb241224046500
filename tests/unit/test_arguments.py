"""Aliases of arguments, numbers and choices, and the keyword arguments of functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import EpisodeBatcher, GymEnv, MonoThreadEpisodeBatcher, Pool, make_parallel_env
from rlpool.errors import SpecError
from rlpool.machine.arguments import (
    called_with_seed,
    check_choice,
    checked_timeout,
    real_number,
    takes_keyword,
    whole_number,
)

from support.agents import ConstantAgent
from support.envs import CountingEnv
from support.examples import create_env

FACTORIES: Any = {"create_agent": ConstantAgent, "create_env": create_env}


def seeds_of(batcher: Any) -> list[int]:
    with batcher:
        batcher.execute(4)
        seeds: list[int] = batcher.get().info["seed"].tolist()
        return seeds


def test_legacy_argument_names_mean_the_same() -> None:
    expected = seeds_of(EpisodeBatcher(3, 4, **FACTORIES, n_workers=0, seeds=5))
    assert seeds_of(EpisodeBatcher(3, 4, **FACTORIES, n_threads=0, seed=5)) == expected
    assert seeds_of(MonoThreadEpisodeBatcher(**FACTORIES, seed=5)) == expected
    assert Pool(processes=2, pool_size=8).pool_size == Pool(None, 2, 8).pool_size
    with make_parallel_env("CartPole-v1", 2, num_workers=1) as env:
        assert env.n_lanes == 1
    with pytest.raises(SpecError, match="processes"):
        Pool(n_workers=2, pool_size=8, processes=2)


def takes(seed: Any = None, n: int = 1) -> Any:
    return seed, n


def takes_none(n: int = 1) -> Any:
    return "none", n


def handing_on(function: Any) -> Any:
    return functools.wraps(function)(lambda *given, **named: function(*given, **named))


class Maker:
    def method(self, seed: Any) -> Any:
        return seed, 1

    __call__ = staticmethod(handing_on(takes_none))


FACTORIES_AND_SEEDED: list[tuple[Any, bool]] = [
    (takes, True),
    (takes_none, False),
    (lambda n=1, **others: (others["seed"], n), True),
    (functools.partial(takes, seed=8), True),
    (functools.partial(takes, 8), False),
    (Maker(), False),
    (Maker().method, True),
    (handing_on(takes), True),
]


def test_a_factory_gets_a_seed_if_it_takes_one() -> None:
    for create, is_seeded in FACTORIES_AND_SEEDED:
        assert takes_keyword(create, "seed") == is_seeded
        first, n = called_with_seed(create, 5, {})
        assert (first == 5, n) == (is_seeded, 1)
    assert called_with_seed(takes, 5, {"seed": 9}) == (
        9,
        1,
    )  # one among the arguments takes precedence
    assert takes_keyword(dict, "seed")  # callables without a signature may take anything
    assert not takes_keyword(dict, "seed", otherwise=False)


ANNOTATED = """
def policy(observation: Missing) -> Missing:
    return {"action": observation["frame"][:, 0].long()}

class Env(CountingEnv):
    def reset(self, *, seed: Missing = None, options: Missing = None) -> Missing:
        return super().reset(seed=seed, options=options)

def create_env(seed: Missing) -> Missing:
    return GymEnv([Env()], seed)
"""


def test_annotations_may_name_types_imported_only_for_type_checking() -> None:
    # Without this module's `from __future__ import annotations` where Python does not need it.
    is_lazy = sys.version_info >= (3, 14)
    names: dict[str, Any] = {"CountingEnv": CountingEnv, "GymEnv": GymEnv}
    exec(compile(ANNOTATED, "program", "exec", dont_inherit=is_lazy), names)
    create = {"create_agent": lambda: names["policy"], "create_env": names["create_env"]}
    assert len(seeds_of(EpisodeBatcher(8, 4, **create, n_workers=0, seed=5))) == 4


def test_numbers_may_be_scalars_of_any_library() -> None:
    for value in (3, np.int32(3), np.array(3), torch.tensor(3)):
        number = whole_number("n", value, 1)
        assert (number, type(number)) == (3, int)
    for scalar in (1, np.float32(1), torch.tensor(1.0)):
        real = real_number("x", scalar, "from 0 to 1")
        assert (real, type(real)) == (1.0, float)
    assert checked_timeout(None) is None
    assert checked_timeout(np.inf) == np.inf
    check_choice("flag", np.True_, (True, False))


REFUSED: list[tuple[Callable[[Any], Any], tuple[Any, ...]]] = [
    (
        lambda value: whole_number("x", value, 1),
        (0, True, 3.0, "3", None, np.array([3]), torch.tensor([3]), torch.tensor(3.5)),
    ),
    (
        lambda value: real_number("x", value, "from 0 to 1"),
        (True, np.True_, "1", None, np.ones(2), torch.ones(1), 1j, np.nan, -0.1, 1.1),
    ),
    (lambda value: real_number("x", value, "above 0"), (0, -1, 10**400)),
    (lambda value: real_number("x", value, "from 0 on, and finite"), (-0.1, np.inf)),
    (
        lambda value: check_choice("x", value, ("a", "b")),
        ("c", 1, None, True, np.array(["a"]), ["a"], torch.ones(2)),
    ),
    (lambda value: check_choice("x", value, (True, False)), (1,)),
]


def test_anything_else_is_refused_by_name() -> None:
    for check, values in REFUSED:
        for value in values:
            with pytest.raises(SpecError, match=r"^x should be"):
                check(value)
