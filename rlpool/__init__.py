"""rlpool: experience collection for reinforcement learning in PyTorch.

The examples in docstrings run as tests. They use every public name of ``rlpool`` and
``rlpool.testing``, ``torch``, ``np`` and ``gymnasium`` as if imported. ``create_agent()`` makes the
agent of the example of ``Agent``, and ``create_env(seed)`` two environments that count their steps:
``GymEnv([CountingEnv(length=4) for _ in range(2)], seed)``.
"""

from rlpool.agents.agent import Agent
from rlpool.agents.device_agent import DeviceAgent
from rlpool.agents.replay import replay_agent
from rlpool.agents.sampling import (
    categorical_log_probability,
    normal_log_probability,
    sample_categorical,
    sample_normal,
    sample_tanh_normal,
)
from rlpool.batch.batcher import EpisodeBatcher, MonoThreadEpisodeBatcher
from rlpool.batch.window_batcher import Batcher
from rlpool.data.array import Array
from rlpool.data.dict_tensor import DictTensor, masked_dicttensor, masked_tensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.gym_env import GymEnv, GymEnvInf
from rlpool.envs.vec_env import VecEnv
from rlpool.envs.vector_gym_env import VectorGymEnv
from rlpool.errors import (
    AgentError,
    AgentSpecError,
    EnvError,
    EnvSpecError,
    NotEnoughDataError,
    NotRepeatedError,
    RlpoolError,
    SpecError,
    UsageError,
    Where,
    WorkerDiedError,
    WorkerError,
    WorkerStartupError,
    WorkerTimeoutError,
)
from rlpool.evaluation.evaluate import Verification, evaluate, verify
from rlpool.evaluation.figures import Comparison, Estimate, Summary, compare, plot
from rlpool.evaluation.result import Evaluation
from rlpool.machine.limits import worker_count
from rlpool.manager.parallel_env import ParallelEnvManager
from rlpool.meta.agents import AGENT_ARCHS
from rlpool.meta.learner import Learner, collect_rollouts_parallel
from rlpool.meta.trials import VariBadWrapper, make_env, make_parallel_env
from rlpool.observe.stats import Stats
from rlpool.pool.pool import Pool
from rlpool.record.repeat import Replay, replay
from rlpool.training.normalizers import RewardNormalizer, RunningNormalizer
from rlpool.training.returns import VTrace, discounted_returns, gae, n_step_returns, vtrace
from rlpool.training.statistics import (
    EndedEpisodes,
    EpisodeStatistics,
    episode_lengths,
    episode_returns,
)
from rlpool.workers.process_start import preload, shutdown

__version__ = "0.4.0"
"""The installed version.

Example:
    >>> print("rlpool", rlpool.__version__)
    rlpool 0...
"""

__all__ = [
    "AGENT_ARCHS",
    "Agent",
    "AgentError",
    "AgentSpecError",
    "Array",
    "Batcher",
    "Comparison",
    "DeviceAgent",
    "DictTensor",
    "EndedEpisodes",
    "EnvError",
    "EnvSpecError",
    "EpisodeBatcher",
    "EpisodeStatistics",
    "Estimate",
    "Evaluation",
    "GymEnv",
    "GymEnvInf",
    "Learner",
    "MonoThreadEpisodeBatcher",
    "NotEnoughDataError",
    "NotRepeatedError",
    "ParallelEnvManager",
    "Pool",
    "Replay",
    "RewardNormalizer",
    "RlpoolError",
    "RunningNormalizer",
    "SpecError",
    "Stats",
    "Summary",
    "TemporalDictTensor",
    "UsageError",
    "VTrace",
    "VariBadWrapper",
    "VecEnv",
    "VectorGymEnv",
    "Verification",
    "Where",
    "WorkerDiedError",
    "WorkerError",
    "WorkerStartupError",
    "WorkerTimeoutError",
    "__version__",
    "categorical_log_probability",
    "collect_rollouts_parallel",
    "compare",
    "discounted_returns",
    "episode_lengths",
    "episode_returns",
    "evaluate",
    "gae",
    "make_env",
    "make_parallel_env",
    "masked_dicttensor",
    "masked_tensor",
    "n_step_returns",
    "normal_log_probability",
    "plot",
    "preload",
    "replay",
    "replay_agent",
    "sample_categorical",
    "sample_normal",
    "sample_tanh_normal",
    "shutdown",
    "verify",
    "vtrace",
    "worker_count",
]
