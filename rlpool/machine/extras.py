"""Packages that are not installed with rlpool: imported on use, and asked for by extra."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlpool.errors import compose


def import_extra(module: str, extra: str) -> Any:
    """Import a module of a package that an extra installs.

    Args:
        module: Its full name.
        extra: The extra of rlpool.

    Raises:
        ImportError: If the package is not installed; it names the extra.
    """
    with imports_of(extra):
        return importlib.import_module(module)


@contextmanager
def imports_of(extra: str) -> Iterator[None]:
    """A section that imports what an extra installs; see ``import_extra``."""
    try:
        yield
    except ImportError as error:
        what = f"{error.name} is not installed" if error.name else str(error)
        raise ImportError(compose(what, fix=f"pip install 'rlpool[{extra}]'")) from error
