# SPDX-License-Identifier: Apache-2.0
"""Processes that a benchmark asks for numbers, one for each provider: what breaks one of them breaks no other.

    parent    worker = Worker([sys.executable, "bench_x.py", "--worker", "name"], log)
              worker.send("measure", size="small");  worker.receive(60.0)
    child     serve({"measure": measure})        measure(size="small") → anything JSON can hold

Requests and answers are lines of JSON on the child's standard input and output. What the child prints goes to `log`. A
child ends when its parent does: its standard input ends then.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

Handler = Callable[..., Any]
LONGEST_REASON = 200


class WorkerError(RuntimeError):
    """Why there is no answer, in one line."""


class WorkerTimeout(WorkerError):
    """There was none in the time that was given."""


def reason_of(error: BaseException) -> str:
    """Its type and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:LONGEST_REASON]


class Worker:
    """A process that answers one request after the other; `variables` are added to its environment."""

    def __init__(
        self, command: list[str], log: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, **(variables or {})},
            )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._why_dead = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def send(self, request: str, **options: Any) -> None:
        """Ask; `receive` has the answer. A process that is dead says so there."""
        if self._why_dead:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: `receive` finds out how
            self._process.stdin.write(json.dumps([request, options]) + "\n")
            self._process.stdin.flush()

    def receive(self, timeout: float) -> Any:
        """The answer to the oldest request that has none.

        Raises:
            WorkerTimeout: there was no answer within `timeout` seconds, after which the process is killed.
            WorkerError: the handler raised, or the process has ended.
        """
        if self._why_dead:
            raise WorkerError(self._why_dead)
        try:
            line = self._answers.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            self._end(f"no answer within {timeout:.0f} s", WorkerTimeout)
        if line is None:
            self._process.wait()
            self._end(f"ended with code {self._process.returncode}: {self._last_line()}")
        kind, value = json.loads(line)
        if kind == "error":
            raise WorkerError(value)
        return value

    def ask(self, request: str, timeout: float, **options: Any) -> Any:
        self.send(request, **options)
        return self.receive(timeout)

    def _end(self, why: str, kind: type[WorkerError] = WorkerError) -> NoReturn:
        self._why_dead = why[:LONGEST_REASON]
        self.close()
        raise kind(self._why_dead)

    def _last_line(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it printed nothing"

    def close(self) -> None:
        """End the process, its memory with it."""
        self._why_dead = self._why_dead or "closed"
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what was written last is still in its buffer
            self._process.stdin.close()


class Local:
    """The interface of `Worker` in this process, for a CPU and for tests."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers, self._answers = handlers, []  # type: ignore[var-annotated]

    def send(self, request: str, **options: Any) -> None:
        self._answers.append(_answer(self._handlers, request, options))

    def receive(self, timeout: float) -> Any:
        kind, value = json.loads(self._answers.pop(0))
        if kind == "error":
            raise WorkerError(value)
        return value

    def ask(self, request: str, timeout: float, **options: Any) -> Any:
        self.send(request, **options)
        return self.receive(timeout)

    def close(self) -> None:
        self._handlers = {}


def _answer(handlers: Mapping[str, Handler], request: str, options: dict[str, Any]) -> str:
    try:
        return json.dumps(["ok", handlers[request](**options)])
    except Exception as error:  # the parent decides what it means
        traceback.print_exc()
        return json.dumps(["error", reason_of(error)])


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answer requests until there are no more; what anyone prints meanwhile goes to standard error."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request, options = json.loads(line)
        began = time.perf_counter()
        answer = _answer(handlers, request, options)
        print(
            f"{request} {options}: {time.perf_counter() - began:.1f} s, {answer[:300]}", flush=True
        )
        answers.write(answer + "\n")
        answers.flush()
