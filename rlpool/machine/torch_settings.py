"""Settings of torch that hold for a whole process and change results: the caller's in workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch


class TorchSettings(NamedTuple):
    """Settings of torch for a process.

    The default device is not among them: for what runs in workers it is the CPU.

    Attributes:
        default_dtype: See ``torch.set_default_dtype``.
        deterministic_debug_mode: Of ``torch.use_deterministic_algorithms``: 0 if it is off, 1 if
            it warns only, 2 if it raises.
        float32_matmul_precision: See ``torch.set_float32_matmul_precision``.
    """

    default_dtype: torch.dtype
    deterministic_debug_mode: int
    float32_matmul_precision: str

    @classmethod
    def current(cls) -> TorchSettings:
        """Those of this process."""
        return cls(
            torch.get_default_dtype(),
            torch.get_deterministic_debug_mode(),
            torch.get_float32_matmul_precision(),
        )

    def use(self) -> None:
        """Let them hold in this process."""
        if self != self.current():
            torch.set_default_dtype(self.default_dtype)
            # The same as use_deterministic_algorithms, which imports the compiler: a second.
            torch.set_deterministic_debug_mode(self.deterministic_debug_mode)
            torch.set_float32_matmul_precision(self.float32_matmul_precision)


class OwnSettings:
    """Settings as in a worker process, in the caller's: one thread, the CPU, the caller's else."""

    def __init__(self) -> None:
        self._own = TorchSettings.current()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A section with these settings, which always ends with the caller's restored."""
        callers, n_threads = TorchSettings.current(), torch.get_num_threads()
        is_on_cpu = default_device().type == "cpu"
        try:
            self._own.use()
            if n_threads != 1:  # the bits of a result can depend on it
                torch.set_num_threads(1)
            with nullcontext() if is_on_cpu else torch.device("cpu"):
                yield
        finally:
            self._own = TorchSettings.current()
            torch.set_num_threads(n_threads)
            callers.use()


def default_device() -> torch.device:
    """Where torch creates tensors in this process."""
    return torch.empty(0).device
