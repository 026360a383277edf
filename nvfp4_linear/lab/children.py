"""The parent's side of a worker: start it, ask it, and take its death or silence for an answer.

    with Child(library) as child:
        child.ask("check", timeout=20, problem=..., rows=..., numbers=...)

``ask`` raises `ChildLost` where the child died ("killed by SIGFPE"), hung (nothing new for `timeout`
seconds; it is killed then) or answered with an error; ``number`` says which candidate it had in
hand. A lost child is dead: start another.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .. import _cublaslt as lt

WORKER = Path(__file__).with_name("worker.py")
PACKAGE_ROOT = Path(__file__).parents[2]
READ_BYTES = 1 << 16
TICK_S = 0.2  # how often the parent looks whether the child gets on
STOP_S = 5.0


class ChildLost(RuntimeError):
    """A child that is no more. number: the candidate it had in hand, -1 for none."""

    def __init__(self, reason: str, number: int) -> None:
        super().__init__(reason)
        self.number = number


class Child:
    """One worker process; one thread may use it.

    device_index: of the GPU, which the worker sees as its only one.
    """

    def __init__(self, library: str, device_index: int = 0) -> None:
        with tempfile.TemporaryFile() as progress:
            progress.write(struct.pack("<q", -1))
            progress.flush()
            self._progress = mmap.mmap(progress.fileno(), 8, access=mmap.ACCESS_READ)
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
            request_read, request_write = os.pipe()
            reply_read, reply_write = os.pipe()
            theirs = (request_read, reply_write, progress.fileno())
            try:
                self._process = subprocess.Popen(
                    [sys.executable, str(WORKER), lt.__file__, library, str(os.getpid())]
                    + [str(file) for file in theirs],
                    pass_fds=theirs,
                    env=_environment(device_index),
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    start_new_session=True,  # Ctrl-C is the parent's to handle
                )
            finally:
                os.close(request_read)
                os.close(reply_write)
        self._requests = os.fdopen(request_write, "w")
        self._replies = reply_read
        self._buffer = b""

    @property
    def process_id(self) -> int:
        return self._process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, op: str, *, timeout: float, **request: Any) -> Any:
        """The reply to one request. timeout: seconds without a reply or a new candidate."""
        try:
            self._requests.write(json.dumps({"op": op, **request}) + "\n")
            self._requests.flush()
            line = self._read_line(timeout)
        except BrokenPipeError:
            line = None
        if line is None:
            raise self._lost(self._death())
        reply = json.loads(line)
        if "error" in reply:
            self._kill()
            raise self._lost(reply["error"])
        return reply

    def close(self) -> None:
        """Ends the child; kills it where it does not end by itself."""
        if self._requests.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()  # end of file: the child leaves its loop
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._kill()
        os.close(self._replies)
        self._log.close()
        self._progress.close()

    def _read_line(self, timeout: float) -> bytes | None:
        """The next line; None where the child is dead. Raises ChildLost where it hangs."""
        last, since = self._number(), time.monotonic()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._replies], [], [], TICK_S)
            if ready:
                read = os.read(self._replies, READ_BYTES)
                if not read:
                    return None
                self._buffer += read
                since = time.monotonic()
                continue
            if self._number() != last:
                last, since = self._number(), time.monotonic()
            elif time.monotonic() - since > timeout:
                number = self._number()
                self._kill()
                raise ChildLost(f"hung: no answer within {timeout:g} s, killed", number)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _number(self) -> int:
        return struct.unpack("<q", self._progress[:8])[0]

    def _lost(self, reason: str) -> ChildLost:
        return ChildLost(reason, self._number())

    def _death(self) -> str:
        try:
            status = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._kill()
            return "closed its pipe and did not end, killed"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"ended with status {status}: {self._last_words()}"

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _environment(device_index: int) -> dict[str, str]:
    """This process's, with one GPU visible and the package importable; pins are not the lab's."""
    values = {key: value for key, value in os.environ.items() if key != "NVFP4_PINS"}
    visible = values.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else None
    values["CUDA_VISIBLE_DEVICES"] = names[device_index] if names else str(device_index)
    paths = [str(PACKAGE_ROOT), *filter(None, [values.get("PYTHONPATH")])]
    values["PYTHONPATH"] = os.pathsep.join(paths)
    return values
