"""Which scripts surely lack their guard, and which may not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlpool import UsageError
from rlpool.machine.main_guard import missing_guard, refuse_missing_guard

PREAMBLE = """
from rlpool.machine.main_guard import refuse_missing_guard as start
import os, multiprocessing, logging, contextlib
LOG = logging.getLogger(__name__)

def main():
    print(LOG, os.__name__)
    start()

def run(function):
    function()

class Program:
    def __call__(self):
        start()
"""

LACKING = {
    "a call": "start()",
    "a function": "main()",
    "functions": "run(main)",
    "a method": "Program()()",
    "an assignment": "made = start()",
    "a with statement": "with contextlib.nullcontext():\n    start()",
    "a loop": "for _ in range(2):\n    start()",
    "a try": "try:\n    pass\nfinally:\n    start()",
    "several lines": "run(\n    main\n)",
    "after conditions": "if LOG:\n    pass\nmain()",
}

MAY_HAVE_ONE = {
    "a guard": 'if __name__ == "__main__":\n    main()',
    "a guard the other way round": 'if __name__ != "__main__":\n    pass\nelse:\n    main()',
    "a guard that is noted": 'is_main = "__main__" == __name__\nmain()',
    "a condition": "if LOG:\n    main()",
    "a condition within": "with contextlib.nullcontext():\n    if LOG:\n        main()",
    "a loop on a condition": "while True:\n    main()\n    break",
    "an expression": "LOG and main()",
    "a choice": "main() if LOG else None",
    "a match": "match LOG:\n    case _:\n        main()",
    "a decorator": "@run\ndef other():\n    start()",
    "a class body": "class Other:\n    made = start()",
    "the name of the process": "multiprocessing.current_process\nmain()",
    "the number of the process": "from os import getpid\nmain()",
}


class Script:
    """Runs scripts as the interpreter does, except that it goes on."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self._monkeypatch = monkeypatch

    def run(self, source: str, **attributes: Any) -> None:
        self.path.write_text(PREAMBLE + source + "\n")
        main = ModuleType("__main__")
        vars(main).update({"__file__": str(self.path), **attributes})
        self._monkeypatch.setitem(sys.modules, "__main__", main)
        exec(compile(PREAMBLE + source, str(self.path), "exec"), vars(main))


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(tmp_path / "train.py", monkeypatch)


@pytest.mark.parametrize("name", LACKING)
def test_a_script_that_lacks_its_guard_is_refused(script: Script, name: str) -> None:
    with pytest.raises(UsageError, match="for want of an `if __name__") as caught:
        script.run(LACKING[name])
    line = next(word for word in str(caught.value).splitlines() if "where:" in word)
    assert line.startswith(f"  where: {script.path}, line ")
    number = int(line.rpartition(" ")[2])
    statement = script.path.read_text().splitlines()[number - 1]
    assert any(word in statement for word in ("start()", "main()", "run(", "Program()"))


@pytest.mark.parametrize("name", MAY_HAVE_ONE)
def test_a_script_that_may_have_one_goes_on(script: Script, name: str) -> None:
    script.run(MAY_HAVE_ONE[name])


def test_what_workers_do_not_import_needs_no_guard(script: Script, tmp_path: Path) -> None:
    class Spec:
        name = "package.__main__"

    script.run("main()", __spec__=Spec())
    script.run("main()", __file__=None)
    script.run("main()", __file__=str(tmp_path / "<stdin>"))
    Spec.name = "package.train"
    with pytest.raises(UsageError):
        script.run("main()", __spec__=Spec())


def test_a_script_that_others_run_goes_on(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runner_of_a_test.py").write_text("def go(function):\n    function()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    script.run("import runner_of_a_test\nrunner_of_a_test.go(main)")


def test_a_script_that_cannot_be_read_goes_on(script: Script) -> None:
    script.run("import pathlib\npathlib.Path(__file__).write_text('(')\nmain()")


def test_this_process_goes_on() -> None:
    refuse_missing_guard()


def test_the_message_tells_what_to_do() -> None:
    what, where, fix = str(missing_guard("train.py, line 3")).splitlines()
    assert "for want of" in what
    assert where == "  where: train.py, line 3"
    assert 'below `if __name__ == "__main__":`' in fix
