"""The batchers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rlpool.batch.batcher_base import CreateAgent, CreateEnv, Seeds
from rlpool.batch.progress import ShowProgress, checked_progress
from rlpool.cluster.batchers import ClusterBatcher, ClusterEpisodeBatcher
from rlpool.cluster.transport import Transport
from rlpool.errors import SpecError
from rlpool.machine.arguments import also_takes, real_number, whole_number
from rlpool.record.capsule_files import CrashDir
from rlpool.workers.failure_policy import (
    DEFAULT_TIMEOUT_S,
    BatcherOptions,
    policy_of,
    takes_policy,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RayEpisodeBatcher(ClusterEpisodeBatcher):
    """Collects complete episodes on the nodes of a Ray cluster.

    Calls, rows and bits are those of ``EpisodeBatcher``, whose workers run on every node. A request
    is divided into groups of consecutive episodes; what a lost node had runs again on others.

    Needs the extra ``ray``. Unless your program has called ``ray.init()``, this does.

    Args:
        n_timesteps: As for ``EpisodeBatcher``.
        n_slots: Slots in flight, of all nodes together.
        create_agent: As for ``EpisodeBatcher``. Modules that are imported for it must be installed
            on all nodes, or be in Ray's ``runtime_env``.
        agent_args: As for ``EpisodeBatcher``.
        create_env: As for ``EpisodeBatcher``, with the same restriction.
        env_args: As for ``EpisodeBatcher``.
        n_workers: Worker processes on each node, each with a processor of its own.
        n_nodes: How many nodes to use; ``None`` for all that there are, and those that join later.
        seeds: As for ``EpisodeBatcher``; a list may have any length.
        timeout: As for ``EpisodeBatcher``, also for a node that does not answer, and for a cluster
            that has no node left.
        crash_dir: As for ``EpisodeBatcher``, on the machine of the caller.
        agent_rows: As for ``EpisodeBatcher``.
        require_same_bits: Refuse nodes whose processor or libraries may compute other bits, which
            otherwise only causes a warning.
        progress: As for ``EpisodeBatcher``.
        **policy: As for ``EpisodeBatcher``; ``max_restarts`` counts restarts of workers and nodes'
            processes, not machines that leave.

    Raises:
        SpecError: As for ``EpisodeBatcher``; if the cluster has too few nodes with so many free
            processors and so much of ``resources``.
        WorkerStartupError, WorkerDiedError, UsageError: As for ``EpisodeBatcher``.
        ImportError: If Ray is not installed.

    Example:
        >>> from rlpool.cluster import RayEpisodeBatcher
        >>> with RayEpisodeBatcher(8, 16, create_agent, {}, create_env, seeds=0) as batcher:
        ...     batcher.execute(n_episodes=12)
        ...     print(batcher.get()["frame"].shape)
        torch.Size([12, 4, 1])
    """

    @also_takes(n_threads="n_workers", seed="seeds")
    @takes_policy
    def __init__(
        self,
        n_timesteps: int,
        n_slots: int,
        create_agent: CreateAgent | None = None,
        agent_args: Mapping[str, Any] | None = None,
        create_env: CreateEnv | None = None,
        env_args: Mapping[str, Any] | None = None,
        n_workers: int = 1,
        n_nodes: int | None = None,
        seeds: Seeds = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        crash_dir: CrashDir = None,
        agent_rows: int | None = None,
        require_same_bits: bool = False,
        resources: Mapping[str, Any] | None = None,
        progress: ShowProgress = False,
        **policy: Unpack[BatcherOptions],
    ) -> None:
        self._progress = checked_progress(progress)
        connect = _connection(n_nodes, n_workers, resources)
        factories = create_agent, agent_args, create_env, env_args
        failing = timeout, policy_of(policy), crash_dir
        arguments = n_timesteps, n_slots, *factories, n_workers, seeds, *failing, agent_rows
        super().__init__(connect, *arguments, require_same_bits=require_same_bits)


class RayBatcher(ClusterBatcher):
    """Collects windows on the nodes of a Ray cluster.

    Calls, rows and bits are those of ``Batcher``. The nodes that are there at the beginning divide
    the lanes among them, those of the first one come first. Lanes of a node that is lost go on
    elsewhere, from where they were: their recorded actions are repeated there.

    Args:
        n_timesteps: As for ``Batcher``.
        n_slots: Ignored; accepted because ``RayEpisodeBatcher`` takes it.
        create_agent: As for ``RayEpisodeBatcher``.
        agent_args: As for ``RayEpisodeBatcher``.
        create_env: As for ``RayEpisodeBatcher``.
        env_args: As for ``RayEpisodeBatcher``.
        n_workers: As for ``RayEpisodeBatcher``.
        n_nodes: How many nodes to use; ``None`` for all that there are. The number of lanes follows
            from it, and stays.
        seeds: As for ``RayEpisodeBatcher``.
        timeout: As for ``RayEpisodeBatcher``.
        crash_dir: As for ``RayEpisodeBatcher``.
        agent_rows: As for ``EpisodeBatcher``.
        require_same_bits: As for ``RayEpisodeBatcher``.
        resources: As for ``RayEpisodeBatcher``.
        **policy: As for ``Batcher``; ``max_restarts`` as for ``RayEpisodeBatcher``.

    Example:
        >>> from rlpool.cluster import RayBatcher
        >>> with RayBatcher(3, None, create_agent, {}, create_env, n_nodes=1) as batcher:
        ...     batcher.reset()
        ...     batcher.execute()
        ...     print(batcher.get()["frame"].shape)
        torch.Size([2, 3, 1])
    """

    @also_takes(n_threads="n_workers", seed="seeds")
    @takes_policy
    def __init__(
        self,
        n_timesteps: int,
        n_slots: int | None = None,
        create_agent: CreateAgent | None = None,
        agent_args: Mapping[str, Any] | None = None,
        create_env: CreateEnv | None = None,
        env_args: Mapping[str, Any] | None = None,
        n_workers: int = 1,
        n_nodes: int | None = None,
        seeds: Seeds = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        crash_dir: CrashDir = None,
        agent_rows: int | None = None,
        require_same_bits: bool = False,
        resources: Mapping[str, Any] | None = None,
        **policy: Unpack[BatcherOptions],
    ) -> None:
        connect = _connection(n_nodes, n_workers, resources)
        factories = create_agent, agent_args, create_env, env_args
        failing = timeout, policy_of(policy), crash_dir
        arguments = n_timesteps, n_slots, *factories, n_workers, seeds, *failing, agent_rows
        super().__init__(connect, *arguments, require_same_bits=require_same_bits)


def _connection(
    n_nodes: int | None, n_workers: int, resources: Mapping[str, Any] | None
) -> Callable[[], Transport]:
    """What connects with the cluster, once the other arguments were checked.

    Raises:
        ImportError: If Ray is not installed.
        SpecError: For impossible numbers.
    """
    from rlpool.cluster.ray_transport import RayTransport

    n_workers = whole_number("n_workers", n_workers, 1)
    if n_nodes is not None:
        n_nodes = whole_number("n_nodes", n_nodes, 1, fix="pass n_nodes=None for all there are")
    amounts = _checked_mapping("resources", resources, 'pass numbers by Ray\'s names: {"GPU": 1}')
    labels = _checked_mapping(
        "resources['labels']", amounts.pop("labels", None), 'pass strings: {"zone": "a"}', str
    )
    if "CPU" in amounts:
        raise SpecError("resources has 'CPU'", fix="n_workers says how many processors a node uses")
    bundle = {key: real_number(f"resources[{key!r}]", amounts[key], "above 0") for key in amounts}
    return partial(RayTransport, n_nodes, {"CPU": n_workers, **bundle}, labels)


def _checked_mapping(name: str, value: Any, fix: str, kind: type = object) -> dict[str, Any]:
    """A mapping from strings to values of a kind; empty for ``None``."""
    is_mapping = isinstance(value, Mapping | None)
    entries = dict(value or {}) if is_mapping else {}
    are_right = (isinstance(k, str) and isinstance(v, kind) for k, v in entries.items())
    if not is_mapping or not all(are_right):
        raise SpecError(f"{name} is {value!r:.80}", fix=fix)
    return entries
