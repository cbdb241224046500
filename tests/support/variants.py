"""Variants of a test: those that run by default and those that ``-m slow`` adds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def variants(default: Iterable[Any], everything: Iterable[Any] = ()) -> list[Any]:
    """Return representatives, unmarked, and the remaining variants, marked as slow."""
    chosen = list(default)
    rest = [each for each in everything if each not in chosen]
    return chosen + [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.slow)
        for each in rest
    ]
