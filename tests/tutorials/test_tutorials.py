"""Every tutorial runs, made small by its flags."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.programs import run_as_main

TUTORIALS = sorted((Path(__file__).resolve().parents[2] / "tutorials").glob("*.py"))

# Flags that make a tutorial small, and the files that it leaves where it was started.
SMALL = {
    "a2c": ("--n-epochs 3 --n-envs 4 --n-threads 1", []),
    "arrays": ("", []),
    "datastructures": ("", []),
    "dqn": ("--n-steps 20 --n-threads 1", ["dqn.png", "dqn.pt"]),
    "environments": ("--n-steps 20", []),
    "meta_rl": (
        "--num-iters 2 --num-iters-baselines 1 --num-rollouts-per-iter 8",
        ["meta_rl.png"],
    ),
    "multiprocess_episode_batcher": ("--n-cartpole-episodes 40 --n-threads 1", []),
    "nonblocking": ("--n-epochs 3 --n-episodes 8 --n-evaluation-episodes 8", []),
    "pool": ("", []),
    "recurrent_policy": ("--n-epochs 2 --n-episodes 8 --n-threads 1", ["recurrent_policy.png"]),
    "reinforce": ("--n-epochs 3 --n-episodes 8 --n-threads 1", ["reinforce.png"]),
}

# Besides the façade.
PUBLIC_MODULES = ("rlpool.patterns",)

each_tutorial = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


def test_no_tutorial_is_forgotten() -> None:
    assert {path.stem for path in TUTORIALS} == SMALL.keys()


@each_tutorial
def test_tutorial_runs(path: Path, program_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags, files = SMALL[path.stem]
    run_as_main(path, *flags.split(), folder=program_folder)
    output, errors = capfd.readouterr()
    assert "Traceback" not in errors
    assert output
    assert ("tqdm" in path.read_text(encoding="utf-8")) == ("100%|" in errors)
    assert all((program_folder / name).stat().st_size for name in files)


@each_tutorial
def test_tutorial_says_what_it_teaches_and_uses_the_facade_only(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert "you will learn" in (ast.get_docstring(tree) or "").lower()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            assert module in PUBLIC_MODULES or not module.startswith("rlpool.")
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("rlpool") for alias in node.names)
