"""Packages that are not installed with rlpool: imported on use, and asked for by extra."""

from __future__ import annotations

import importlib
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
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package, fix = module.partition(".")[0], f"pip install 'rlpool[{extra}]'"
        raise ImportError(compose(f"{package} is not installed", fix=fix)) from error
