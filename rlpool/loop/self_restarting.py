"""Lanes that cannot be reset one by one: they begin episodes when they restart by themselves."""

from __future__ import annotations

from collections.abc import Sequence

from rlpool.loop.active_plan import ActivePlan, Lane
from rlpool.loop.lane_table import LaneTable


class SelfRestartingLanes(LaneTable):
    """A ``LaneTable`` of a vector environment whose lanes restart when they like, in any step.

    An idle lane begins an episode once it has restarted. In a window, a lane whose episode has
    ended stays in its slot; the steps until it has restarted belong to no episode, and the lane
    writes over them.
    """

    _restarting: Sequence[Lane] = ()  # lanes of a window whose next episode has yet to begin

    def have_news(self) -> bool:
        """See ``LaneTable.have_news``."""
        return super().have_news() or bool(self._env.ready_lanes(self.idle))

    def drop(self, cancelled: ActivePlan) -> None:
        """See ``LaneTable.drop``."""
        self._restarting = [lane for lane in self._restarting if lane.active is not cancelled]
        super().drop(cancelled)

    def _clear(self) -> None:
        super()._clear()
        self._restarting = ()

    def turn_over(self, ended: Sequence[int]) -> None:
        """See ``LaneTable.turn_over``."""
        restarting, self._restarting = self._restarting, ()
        for lane in restarting:
            lane.active.rows[lane.number] -= 1  # its step was none of an episode
        if restarting:
            self._restart(restarting)
        super().turn_over(ended)

    def _restart(self, lanes: Sequence[Lane]) -> None:
        ready = self._env.ready_lanes([lane.number for lane in lanes])
        if len(ready) < len(lanes):
            others = [lane for lane in lanes if lane.number not in ready]
            self._restarting = [*self._restarting, *others]
            self.steps_until_full = 0  # take stock
        if ready:
            super()._restart([lane for lane in lanes if lane.number in ready])

    def _full_lanes(self, active: ActivePlan) -> list[Lane]:
        """All lanes: a window is over for those as well that have restarted, and did less."""
        full = super()._full_lanes(active)
        if not full or not active.restarts:
            return full
        live = [self.running[lane] for lane in self.live if lane in self.running]
        for lane in live:
            # The step in which one restarts may be written already.
            active.writer.abandon(lane.slot, active.steps_in_slot(lane))
        return live

    def _deal(self, starting: list[Lane]) -> None:
        ready = self._env.ready_lanes(self.idle)
        others = set(self.idle).difference(ready)
        self.idle = list(ready)
        super()._deal(starting)
        self.idle = sorted(others.union(self.idle))

    def _take_stock(self) -> None:
        super()._take_stock()
        if self._restarting:
            self.steps_until_full = 1  # after every step it is seen who has restarted
