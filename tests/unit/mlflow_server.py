"""A real MLflow server on the loopback, for the tests that need one."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

START_S = 300


@contextlib.contextmanager
def running(database: Path, log: Path, *arguments: str) -> Iterator[str]:
    """The address of a server on that database, until the body is done."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{database}", *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "MLFLOW_TRACKING_URI"}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, cwd=log.parent, env=environment
        )
        try:
            _wait(address, process, log)
            yield address
        finally:
            process.terminate()
            process.wait()


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise TimeoutError(f"no answer from {address} in {START_S} s: {log.read_text()}")
