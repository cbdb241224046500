"""rlpool: experience collection for reinforcement learning in PyTorch."""

from rlpool.agent import Agent
from rlpool.batcher import Batcher, EpisodeBatcher, MonoThreadEpisodeBatcher
from rlpool.data.dict_tensor import DictTensor, masked_dicttensor, masked_tensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.gym_env import GymEnv, GymEnvInf
from rlpool.envs.vec_env import VecEnv
from rlpool.errors import (
    AgentError,
    AgentSpecError,
    EnvError,
    EnvSpecError,
    NotEnoughDataError,
    RlpoolError,
    SpecError,
    UsageError,
    Where,
    WorkerDiedError,
    WorkerError,
    WorkerStartupError,
    WorkerTimeoutError,
)
from rlpool.replay import replay_agent
from rlpool.sampling import (
    categorical_log_probability,
    normal_log_probability,
    sample_categorical,
    sample_normal,
    sample_tanh_normal,
)

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "AgentError",
    "AgentSpecError",
    "Batcher",
    "DictTensor",
    "EnvError",
    "EnvSpecError",
    "EpisodeBatcher",
    "GymEnv",
    "GymEnvInf",
    "MonoThreadEpisodeBatcher",
    "NotEnoughDataError",
    "RlpoolError",
    "SpecError",
    "TemporalDictTensor",
    "UsageError",
    "VecEnv",
    "Where",
    "WorkerDiedError",
    "WorkerError",
    "WorkerStartupError",
    "WorkerTimeoutError",
    "__version__",
    "categorical_log_probability",
    "masked_dicttensor",
    "masked_tensor",
    "normal_log_probability",
    "replay_agent",
    "sample_categorical",
    "sample_normal",
    "sample_tanh_normal",
]
