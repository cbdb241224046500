"""The cheaper ``Discrete.contains`` gives what Gymnasium's own one gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Discrete

from rlpool.workers.fast_checks import install_fast_checks


@pytest.fixture
def original() -> Iterator[Any]:
    method = Discrete.contains
    yield method
    Discrete.contains = method  # type: ignore[method-assign]


@pytest.mark.parametrize(("n", "start"), [(1, 0), (6, 0), (4, -2)])
@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.float32, int, bool])
def test_it_agrees_with_gymnasium(original: Any, n: int, start: int, kind: Any) -> None:
    assert install_fast_checks()
    space = Discrete(n, start=start)
    for number in range(8):
        value = kind(number)
        assert space.contains(value) is original(space, value)
        assert (value in space) is original(space, value)


def test_a_space_that_is_changed_later_is_looked_at_anew(original: Any) -> None:
    install_fast_checks()
    space = Discrete(2)
    assert not space.contains(np.int64(2))
    space.n = np.int64(3)
    assert space.contains(np.int64(2))


def test_it_is_not_installed_where_gymnasium_decides_otherwise(
    original: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def otherwise(self: Any, x: Any) -> bool:
        return bool(x == 0)

    monkeypatch.setattr(Discrete, "contains", otherwise)
    assert not install_fast_checks()
    assert Discrete.contains is otherwise
