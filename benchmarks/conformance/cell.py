"""Run checks of one library in this process and write a JSON line per event to a file."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time

from benchmarks.conformance import adapters, expect
from benchmarks.conformance.checks import Library
from benchmarks.conformance.checks.every import CHECKS
from benchmarks.conformance.interface import Collector


def judge(name: str, adapter: type[Collector], report: object) -> tuple[str, str]:
    """Return the colour of one cell and its message."""
    check = CHECKS[name]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        library = Library(adapter, folder, lambda: report("ready"))
        try:
            check.function(library)
        except expect.Unexpected as difference:
            return "red", str(difference)
        except BaseException as error:
            if check.signal is not None and library.is_ready:
                raise  # any exception that ends the process after the signal
            print(expect.text_of(error), file=sys.stderr)
            return "red", f"raised {type(error).__name__}: {error}"
    return "green", ""


def main(library: str, path: str, *names: str) -> None:
    """Report the adapter's description and run the checks in order."""

    def report(event: str, **more: object) -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **more}) + "\n")

    signal.signal(signal.SIGINT, signal.default_int_handler)  # even if it was started with &
    adapter = adapters.load(library)
    about = {key: getattr(adapter, key) for key in ("lacks", "intended", "start_s")}
    report("adapter", version=adapter.version(), **about)
    for name in names:
        report("begin", check=name)
        started = time.monotonic()
        status, message = judge(name, adapter, report)
        more = {"message": message, "seconds": round(time.monotonic() - started, 1)}
        report("end", check=name, status=status, **more)


if __name__ == "__main__":
    main(*sys.argv[1:])
