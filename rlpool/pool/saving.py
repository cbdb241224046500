"""Saving a pool, and going on where a saved one was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlpool.errors import SpecError, UsageError
from rlpool.memory.storage import Array
from rlpool.pool import checkpoint
from rlpool.pool.filling import FilledPool
from rlpool.pool.reader import PoolReader
from rlpool.pool.runner import EpisodeRunner
from rlpool.pool.schema import Schema
from rlpool.pool.store import Store


class SavedPool(FilledPool):
    """A pool that can be saved and sent.

    Attributes:
        _runner: What collects episodes, if there are environments.
        _has_stored: Whether it has added some: the first transitions of all processes.
    """

    _runner: EpisodeRunner | None
    _has_stored = False

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next samples depend on, except what environments remember.

        Returns:
            Tensors and a text, which ``torch.save`` writes and ``torch.load(weights_only=True)``
            reads. The tensors are views: save them, or copy them, before the pool is changed.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> torch.save(pool.state_dict(), "pool.pt")
            >>> other = Pool(pool_size=1000)
            >>> other.load_state_dict(torch.load("pool.pt"))
            >>> len(other)
            4
        """
        return checkpoint.to_tensors(*self._state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what another pool was; from here on both give the same samples.

        Args:
            state: What its ``state_dict`` returned; copied.

        Raises:
            SpecError: If the saved pool was made with other sizes, rules, keys or another
                ``priority_exponent``, or holds other keys than this one, which keeps what it has.
                ``seed`` and ``storage`` may differ.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> other = Pool(pool_size=1000)
            >>> other.load_state_dict(pool.state_dict())
            >>> torch.equal(pool.sample(3)["frame"], other.sample(3)["frame"])
            True
        """
        with checkpoint.loading("the state"):
            self._restore(checkpoint.from_tensors(state))

    def save(self, path: str | Path) -> None:
        """Write the pool to a file, without needing memory for that.

        The file is in the safetensors format and holds no code. What was at the path stays until
        all is written.

        Args:
            path: The file.

        Raises:
            SpecError: If the disk is full or the path cannot be written.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> pool([0], 0, [1], 1.0, True)
            >>> pool.save("pool.safetensors")
            >>> pool.load("pool.safetensors")
        """
        checkpoint.write_file(path, *self._state())

    def load(self, path: str | Path) -> None:
        """Become what a saved pool was; from here on both give the same samples.

        Args:
            path: A file that ``save`` wrote. If this pool is not empty, memory must have room for
                both what it holds and what the file holds.

        Raises:
            SpecError: If the file cannot be read or is damaged, or for the reasons of
                ``load_state_dict``. This pool keeps what it has.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> pool.save("pool.safetensors")
            >>> pool.clear()
            >>> pool.load("pool.safetensors")
            >>> len(pool)
            4
        """
        with checkpoint.opened_file(path) as saved:
            self._restore(saved)

    def _state(self) -> tuple[str, dict[str, Array]]:
        """A JSON text and arrays by name, which are views."""
        store = self._store
        in_use = checkpoint.in_use(store, self._n_sub_pools)
        spans = in_use["rings"]
        state = {
            "format": checkpoint.FORMAT,
            **self._arguments,
            **in_use,
            "is_untold": store is not None and bool(store.is_untold[0]),
            "fed": [self._has_stored] * self._n_sub_pools,
            "open_rows": {str(i): 0 for i, n in self._open.items() if n == spans[i][1]},
            "max_priority": self._max_priority,
            "sampling": self._generator.bit_generator.state,
            "routing": self._router.bit_generator.state,
            "runner": None if self._runner is None else self._runner.state_dict(),
        }
        arrays = {} if store is None else checkpoint.arrays_of(store, spans, *store.n_extra)
        return json.dumps(state), arrays

    def _restore(self, saved: checkpoint.Saved) -> None:
        store = self._store
        if store is not None:
            store.refuse_others()
        # Without keys of its own, a pool takes what comes.
        any_keys = self._arguments["keys"] is None
        header = saved.header(
            {k: v for k, v in self._arguments.items() if k != "keys" or not any_keys}
        )
        is_open = {int(i): header["rings"][int(i)][1] for i in header["open_rows"]}
        has_stored, max_priority = any(header["fed"]), float(header["max_priority"])
        generators = np.random.PCG64(), np.random.PCG64()
        for bits, name in zip(generators, ("sampling", "routing"), strict=True):
            bits.state = header[name]
        fresh = self._loaded(saved, header)
        if store is None or fresh is None or self._storage == "local":
            self._store = fresh
        else:  # others may look at its memory
            checkpoint.take_over(store, fresh)
        self._open, self._has_stored, self._max_priority = is_open, has_stored, max_priority
        self._generator, self._router = map(np.random.Generator, generators)
        if self._runner is not None and header["runner"]:
            self._runner.load_state_dict(header["runner"])

    def _loaded(self, saved: checkpoint.Saved, header: Mapping[str, Any]) -> Store | None:
        """A new store of what was saved, ``None`` if there never was a transition anywhere."""
        own = None if self._store is None else self._store.schema
        if header["schema"] is None:  # there never was a transition
            return None if own is None else self._new_store(own)
        schema = Schema.from_plain(header["schema"])
        if own is not None and own != schema:
            raise SpecError(
                f"the saved pool holds {schema}; this one has {own}",
                fix="load it into a pool that holds the same, or nothing yet",
            )
        if self._frame_stack is not None and self._with_stacks(schema) != schema:
            raise SpecError(
                f"the saved pool holds {schema}; this one has frame_stack={self._frame_stack}",
                fix="load it into a pool with the same frame_stack, or without any: that one takes "
                "what is saved",
            )
        store = self._new_store(schema)
        saved.fill(store, header)
        return store

    def __reduce__(self) -> tuple[Any, ...]:
        store = self._store
        if store is None or self._storage == "local":
            raise UsageError(
                "the pool cannot be sent before it has a transition, nor with local memory",
                fix='make it with storage="shared", add the first transitions, then send it',
            )
        return PoolReader, (store.schema, store.pool_size, self._n_sub_pools, store.memory)
