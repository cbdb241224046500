"""What objects have in common that own processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import NoReturn, TypeVar

from rlpool.errors import UsageError, compose

_Self = TypeVar("_Self", bound="ProcessOwner")


class ProcessOwner(ABC):
    """Ends its processes when it is closed, left by a ``with`` statement, or dropped.

    It cannot be copied or pickled: there would be two owners.
    """

    @abstractmethod
    def close(self) -> None:
        """End the processes, within a few seconds. May be repeated."""

    @abstractmethod
    def _has_processes(self) -> bool:
        """Whether there may be something to end, also where the constructor failed half-way."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._has_processes():
            self.close()

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            compose(
                f"a {type(self).__name__} owns processes and cannot be copied or pickled",
                fix="copy what it was made with, and make another one",
            )
        )
