"""A module of rlpool imports only from modules above it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "rlpool"

# The layers from the bottom of the library to its top, as in docs/design.md. A module may import
# from those that come before it, also within functions and for type checkers. Add a new module
# where it belongs.
ORDER = (
    "errors",
    "arguments",
    "restarts",
    "interrupts",
    "generators",
    "ownership",
    "signatures",
    "main_guard",
    "cgroups",
    "limits",
    "pickling",
    "descriptors",
    "specs",
    "seeding",
    "sampling",
    "storage",
    "versions",
    "capsule",
    "worker_limits",
    "log_records",
    "workers.inherited",
    "workers.outbox",
    "workers.logs",
    "workers.stacks",
    "workers.side_channel",
    "stack_dumps",
    "data.dict_tensor",
    "data.temporal_dict_tensor",
    "data.infos",
    "data.index_keys",
    "data.array_index",
    "data.allocation",
    "data.array",
    "patterns",
    "agent",
    "agent_driver",
    "replay",
    "envs.columns",
    "envs.vec_env",
    "envs.former_generator",
    "envs.ancestor_env",
    "envs.make_wrappers",
    "envs.gym_env",
    "envs.handed_out",
    "envs.one_env",
    "slots",
    "preflight",
    "claims",
    "writer",
    "trajectories",
    "history",
    "failures",
    "crash_files",
    "probe",
    "plan",
    "crash_recorder",
    "resumption",
    "rollout",
    "workers.parcel",
    "workers.shipment",
    "workers.wake",
    "workers.messages",
    "workers.caller_pipe",
    "workers.wear",
    "workers.plans",
    "workers.collector",
    "workers.fast_seeding",
    "workers.fast_checks",
    "workers.hang_watch",
    "workers.leash",
    "workers.process_title",
    "workers.process_state",
    "workers.sibling",
    "workers.template",
    "workers.template_handle",
    "workers.warm_start",
    "workers.child",
    "workers.arena",
    "workers.episode_log",
    "workers.env_messages",
    "workers.episodes_ahead",
    "workers.restoring",
    "workers.remote_requests",
    "workers.env_startup",
    "workers.env_child",
    "workers.local",
    "workers.supervisor",
    "workers.recycling",
    "workers.replacements",
    "workers.remote_calls",
    "workers.lane_capsules",
    "workers.successors",
    "workers.watched_crew",
    "workers.env_crew",
    "workers.orders",
    "lane_log",
    "requests",
    "workforce",
    "coordinator",
    "batcher_base",
    "batcher",
    "pool.environments",
    "pool.transitions",
    "pool.acting",
    "pool.collection",
    "pool.ring",
    "pool.intake",
    "pool.row_store",
    "pool.priorities",
    "pool.sharing",
    "pool.reader",
    "pool.pool_reader",
    "pool.transition",
    "pool.writer",
    "pool.checkpoint",
    "pool.pool",
    "device_agent",
    "remotes",
    "parallel_env",
    "crash_replay",
    "meta.trials",
    "meta.make",
    "meta.rows",
    "meta.agents",
    "meta.rollouts",
    "meta.learner",
    "worker_trial",
    "doctor",
    "__main__",
    "testing.findings",
    "testing.generators",
    "testing.counting_env",
    "testing.faults",
    "testing.faulty_env",
    "testing.misfits",
    "testing.episodes",
    "testing.env_subject",
    "testing.env_result_checks",
    "testing.env_repeat_checks",
    "testing.env_checks",
    "testing.check_env",
    "testing.observation_rows",
    "testing.native_actions",
    "testing.agent_subject",
    "testing.agent_results",
    "testing.agent_call_checks",
    "testing.agent_checks",
    "testing.check_agent",
    "testing.contracts",
)

# Their __init__.py holds a docstring and no import.
SUBPACKAGES = ("data", "envs", "meta", "workers", "pool", "integrations")

# What users import from: they import from any module and no module imports from them.
FACADES = ("__init__", "testing.__init__")

# Adapters to other libraries: they may import any module, and are imported where they are used,
# inside a function, so that nobody pays for them or needs them installed.
INTEGRATIONS = "integrations."


def violations(module: str, source: str) -> list[str]:
    """Find the imports of a module of rlpool that break the rules.

    Args:
        module: Name within the package, such as ``"data.array"``; ``"__init__"`` is the façade.
        source: Text of the module.

    Returns:
        One sentence per broken rule.
    """
    found = []
    if not (
        module in ORDER
        or module in FACADES
        or module.removesuffix(".__init__") in SUBPACKAGES
        or module.startswith(INTEGRATIONS)
    ):
        found.append(f"rlpool.{module} is not in ORDER of {Path(__file__).name}: put it there")
    tree = ast.parse(source)
    lazy = {
        inner
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(function)
    }
    for node in ast.walk(tree):
        for target in _targets(node):
            complaint = _complaint(module, target, lazy=node in lazy)
            if complaint:
                found.append(f"rlpool.{module}, line {node.lineno}: {complaint}")
    return found


def _targets(node: ast.AST) -> list[str]:
    """Name what a statement imports from rlpool, relative imports with their dots."""
    if isinstance(node, ast.Import):
        return [f"import {a.name}" for a in node.names if a.name.split(".")[0] == "rlpool"]
    if isinstance(node, ast.ImportFrom):
        if node.level:
            return ["." * node.level + (node.module or "")]
        if (node.module or "").split(".")[0] == "rlpool":
            return [node.module or ""]
    return []


def _complaint(module: str, target: str, *, lazy: bool) -> str | None:
    """Say what is wrong with an import, ``None`` if nothing is."""
    if not target.startswith("rlpool."):
        return f"{target!r}: write 'from rlpool.x.y import z'"
    target = target.removeprefix("rlpool.")
    if target.startswith(INTEGRATIONS):
        if lazy or module.startswith(INTEGRATIONS):
            return None
        return f"rlpool.{target} is an integration: import it in the function that uses it"
    if target not in ORDER:
        return f"rlpool.{target} is no module of ORDER"
    if module in FACADES or module.startswith(INTEGRATIONS):
        return None
    if module not in ORDER:
        return "a subpackage's __init__.py imports nothing of rlpool"
    if ORDER.index(target) >= ORDER.index(module):
        return f"rlpool.{target} is not above rlpool.{module}"
    return None


def _modules() -> list[str]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in paths]


@pytest.mark.parametrize("module", _modules())
def test_module_imports_only_from_above(module: str) -> None:
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    assert violations(module, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("agent", "from rlpool.errors import UsageError"),
        ("agent", "import torch\nfrom torch import Tensor"),
        ("batcher", "from rlpool.workers.supervisor import Supervisor"),
        ("batcher", "def f():\n    from rlpool.integrations.tensordict import convert"),
        ("integrations.tensordict", "from rlpool.meta.learner import anything"),
        ("__init__", "from rlpool.meta.learner import anything"),
        ("testing.__init__", "from rlpool.testing.contracts import EnvContract"),
        ("data.__init__", '"""The data structures."""'),
    ],
)
def test_checker_accepts(module: str, source: str) -> None:
    assert violations(module, source) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        pytest.param("errors", "from rlpool.specs import TensorSpec", id="upwards"),
        pytest.param("errors", "def f():\n    from rlpool.specs import x", id="upwards, lazily"),
        pytest.param("errors", "if TYPE_CHECKING:\n    from rlpool.specs import x", id="for types"),
        pytest.param("agent", "from rlpool.agent import Agent", id="itself"),
        pytest.param("agent", "from rlpool import DictTensor", id="from the facade"),
        pytest.param("agent", "import rlpool", id="the facade"),
        pytest.param("agent", "import rlpool.errors as errors", id="a module"),
        pytest.param("agent", "from .errors import UsageError", id="relative"),
        pytest.param("agent", "from . import errors", id="relative to the package"),
        pytest.param("agent", "from rlpool.data import dict_tensor", id="from a subpackage"),
        pytest.param("meta.learner", "from rlpool.nowhere import x", id="unknown target"),
        pytest.param("nowhere", "", id="unknown module"),
        pytest.param("meta.learner", "from rlpool.integrations.tensordict import x", id="eager"),
        pytest.param("__init__", "from rlpool.integrations.tensordict import x", id="eager facade"),
        pytest.param("data.__init__", "from rlpool.errors import SpecError", id="subpackage"),
    ],
)
def test_checker_refuses(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


def test_order_names_no_module_twice() -> None:
    assert len(set(ORDER)) == len(ORDER)
