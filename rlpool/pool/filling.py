"""Adding transitions to the store of a pool; the first ones determine its schema."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.infos import WINDOW_KEYS
from rlpool.data.specs import TensorSpec, row_specs
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.machine.arguments import whole_number
from rlpool.pool import ingest
from rlpool.pool.sampling import RESULT_KEYS
from rlpool.pool.schema import Schema
from rlpool.pool.store import Settings, Store
from rlpool.pool.sub_pool import routes

_MOST_WAITING = 8  # ends of windows per lane: batchers with the same seeds have the same lanes
_SAVED = ("open", "waiting", "has_run", "max_priority")  # attributes
_OTHER = "load it into a pool with the same arguments"


class Filler:
    """Holds a store, and adds transitions to it.

    Args:
        settings: Settings of the pool.
        router: Chooses sub-pools.

    Attributes:
        store: The store; without columns before the first transition.
        router: As given.
        max_priority: The largest priority so far, to the pool's power; 0 if there is none.
        open: The ``next`` of sub-pools whose newest transition can be continued, by sub-pool.
        waiting: By batcher and lane, the ends of windows that can be continued: a transition (see
            ``SubPools.find``), and episode, number and checksum of the step that would follow it.
        has_run: Whether the first transitions of all processes were added.
    """

    def __init__(self, settings: Settings, router: np.random.Generator) -> None:
        self._settings = settings
        self.router = router
        least = replace(settings, pool_size=settings.n_workers, priority_exponent=None)
        self.store = Store(Schema({}), replace(least, storage="local", directory=None))
        self.max_priority = 0.0
        self.open: dict[int, int] = {}
        self.waiting: dict[tuple[int, int], list[list[int]]] = {}
        self.has_run = False

    # Adding ----------------------------------------------------------------------------------

    def extend(
        self,
        trajectories: TemporalDictTensor,
        index: int | None = None,
        first: Sequence[int] = (),
    ) -> None:
        """Add trajectories, for ``Pool.extend``; ``first`` are the sub-pools of the first ones."""
        index = self._checked_index(index)
        if not trajectories.n_elems() or not int(trajectories.lengths.sum()):
            return
        store, new = self._new_rows(trajectories)
        lengths = trajectories.lengths.cpu().numpy()
        sizes = lengths[lengths > 0]
        chosen = [index or 0] * len(sizes)
        if index is None and self._settings.n_workers > 1:
            draws = [*first, *self.router.random(len(sizes)).tolist()[len(first) :]]
            chosen = routes(store.sub_pools, self._settings.rules, sizes.tolist(), draws)
        names = self._distribute(store, new, sizes, np.array(chosen))
        if all(key in trajectories.info for key in WINDOW_KEYS):
            windows = np.stack([trajectories.info[k].numpy(force=True) for k in WINDOW_KEYS], 1)
            self._join(store, windows[lengths > 0], names, sizes, new.is_last)
        else:
            store.shortest_cut = min(store.shortest_cut, new.shortest_cut)
        self.store = store

    def add(self, values: Mapping[str, NDArray], index: int | None) -> None:
        """Add a transition of arrays without a batch dimension, for ``Pool.pool``."""
        index = self._checked_index(index)
        keys = ingest.chosen(values, self._known_keys(), "the transition")
        specs = {key: TensorSpec(values[key].shape, values[key].dtype) for key in keys}
        store = self._store_for(specs, "the transition")
        new = ingest.from_single(values, store.schema)
        # In a sub-pool chosen here, the previous one is of the same episode only by chance.
        is_chosen = index is None and self._settings.n_workers > 1
        if index is None:
            index = int(np.argmin(store.sub_pools.lengths))
            if is_chosen and self._settings.random:
                (index,) = routes(
                    store.sub_pools, self._settings.rules, [1], [self.router.random()]
                )
        sub_pool = store.sub_pools[index]
        is_open = not is_chosen and self.open.get(index) == sub_pool.next
        joined = is_open and store.ends_in(index, new)
        store.add(index, new, self.max_priority or 1.0, joined=joined)
        if not is_chosen and not values[ingest.DONE_KEY]:
            self.open[index] = sub_pool.next
        self.store = store

    def add_run(self, episodes: Sequence[DictTensor]) -> None:
        """Add the episodes of ``EpisodeRunner.run``."""
        if not self._settings.random or self._settings.n_workers == 1:
            for process, steps in enumerate(episodes):
                row = {key: tensor[None] for key, tensor in steps.items()}
                self.extend(TemporalDictTensor(row), process)
            return
        # Interleave the steps of parallel episodes in time order.
        times = np.concatenate([np.arange(steps.n_elems()) for steps in episodes])
        order = np.argsort(times, kind="stable")
        steps = DictTensor.cat(episodes).index(torch.from_numpy(order))
        rows = TemporalDictTensor({key: tensor[:, None] for key, tensor in steps.items()})
        # The first transition of each process goes into its own sub-pool.
        self.extend(rows, first=[] if self.has_run else range(len(episodes)))
        self.has_run = True

    def _checked_index(self, index: Any) -> int | None:
        n = self._settings.n_workers
        if index is not None and whole_number("index", index, 0) >= n:
            raise SpecError(
                f"index should be the number of a sub-pool, got {index!r}",
                fix=f"there are {n} (n_workers), counted from 0",
            )
        return None if index is None else operator.index(index)

    def _known_keys(self) -> Sequence[str] | None:
        return list(self.store.schema.specs) if self.store.has_schema else self._settings.keys

    def _new_rows(self, trajectories: TemporalDictTensor) -> tuple[Store, ingest.NewRows]:
        """Return the rows of trajectories, and a store that fits them."""
        names = self.store.schema.infos if self.store.has_schema else self._settings.info_keys
        tensors, known = ingest.tensors_of(trajectories, names), self._known_keys()
        infos = tuple(tensors.maps[0])
        if known is not None and not self.store.has_schema:
            known = [*known, *infos]
        store = self._store_for(ingest.specs_of(tensors, known), "the trajectories", infos)
        lengths = trajectories.lengths.cpu().numpy()
        return store, ingest.from_trajectories(tensors, lengths, store.schema)

    def _store_for(
        self, specs: Mapping[str, TensorSpec], source: str, infos: tuple[str, ...] = ()
    ) -> Store:
        """Return the store for transitions; the first ones determine the schema of a new one."""
        if self.store.has_schema:
            self.store.schema.check(specs, source)
            return self.store
        taken = [key for key in RESULT_KEYS if key in specs]
        if taken:
            raise SpecError(f"{source} have the keys {taken}, which samples use", fix="rename them")
        schema = Schema.from_specs(specs, self._settings.frame_stack)
        return Store(replace(schema, infos=infos), self._settings)

    def _distribute(
        self, store: Store, new: ingest.NewRows, sizes: NDArray, chosen: NDArray
    ) -> NDArray:
        """Add pieces of these sizes to these sub-pools.

        Returns:
            The first transition of each piece, as for ``SubPools.find``.
        """
        first = np.zeros_like(sizes)
        for index in np.unique(chosen).tolist():
            mine = chosen == index
            numbers = store.sub_pools[index].next + sizes[mine].cumsum() - sizes[mine]
            first[mine] = numbers * len(store.sub_pools) + index
            part = new if mine.all() else new.part(np.flatnonzero(np.repeat(mine, sizes)))
            store.add(index, part, self.max_priority or 1.0)
        return first

    def _join(
        self, store: Store, windows: NDArray, first: NDArray, sizes: NDArray, is_last: NDArray
    ) -> None:
        """Join rows of windows with the previous windows of their lanes, if these are stored.

        Args:
            store: Their store.
            windows: int64 ``[n, 4]``: the ``WINDOW_KEYS`` of each row's ``info``.
            first: The first transition of each row, as for ``SubPools.find``.
            sizes: Steps of each row.
            is_last: For all steps, whether the next one does not continue the episode.
        """
        ends = np.flatnonzero(is_last)
        places = np.searchsorted(ends, sizes.cumsum() - 1)
        n_ended = np.diff(places, prepend=-1) - 1  # episodes that ended before the last step
        step = np.where(n_ended, 0, windows[:, 3]) + np.diff(ends, prepend=-1)[places]
        last = first + (sizes - 1) * len(store.sub_pools)
        here = np.column_stack([windows[:, 2:], store.checksums(first, after=False)])
        there = np.column_stack([windows[:, 2] + n_ended, step, store.checksums(last, after=True)])
        pairs = []
        rows = zip(*map(np.ndarray.tolist, (windows, first, last, here, there)), strict=True)
        for (batcher, lane, *_), name, newest, position, following in rows:
            waiting = self.waiting.setdefault((batcher, lane), [])
            for end in [end for end in waiting if end[1:] == position][:1]:
                waiting.remove(end)
                pairs.append((end[0], name))
            waiting.append([newest, *following])
            del waiting[:-_MOST_WAITING]
        if pairs:
            store.join(*np.array(pairs).T)

    # State -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next additions depend on; tensors are views."""
        return {
            "settings": self._settings.saved(),
            "store": self.store.state_dict() if self.store.has_schema else None,
            "router": self.router.bit_generator.state,
            **deepcopy({name: vars(self)[name] for name in _SAVED}),
        }

    def loaded(self, state: Mapping[str, Any]) -> Filler:
        """Make a filler with a new store that continues from a saved one.

        Raises:
            SpecError: If the saved pool has other arguments.
        """
        for name, value in self._settings.saved().items():
            found = state["settings"][name]
            # A pool without ``keys`` accepts any.
            if found != value and (value or name not in ("keys", "info_keys")):
                raise SpecError(f"the saved pool has {name} {found}, this one {value}", fix=_OTHER)
        router = np.random.Generator(np.random.PCG64())
        router.bit_generator.state = state["router"]
        other = Filler(self._settings, router)
        if (saved := state["store"]) is not None:
            specs = row_specs({key: tensor.numpy() for key, tensor in saved["specs"].items()})
            other.store = other._store_for(specs, "the state", tuple(saved["infos"]))
            other.store.load_state_dict(saved)
        vars(other).update(deepcopy({name: state[name] for name in _SAVED}))
        return other
