# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` on loopback, as a subprocess that is ended with everything it started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tests.engine import client, processes
from tests.engine.client import Answer
from tests.engine.encoder_probe import LOG_VARIABLE, EncoderProbe, ProbeEvent, read_events

ROOT = Path(__file__).resolve().parents[2]
_PROGRESS_SECONDS = 10.0


class EngineStartError(RuntimeError):
    """The server ended or did not get healthy in time; the message holds the end of its log."""


@dataclass(frozen=True)
class ServerOptions:
    """How a server is started; every field has a value that suits the small checkpoint on two cores."""

    ec_transfer_config: Mapping[str, Any] | None = None
    """The JSON of `--ec-transfer-config`; None starts without a connector."""
    encoder_budget: int = 1024
    """Rows that fit the device's encoder cache: vLLM takes `max_num_batched_tokens`, so this sets both."""
    max_model_len: int = 1024
    """Tokens of a prompt and its answer."""
    video_frames: int = 8
    """Frames that are taken from a clip, evenly spread."""
    tensor_parallel: int = 1
    """Ranks; each gets one core."""
    kv_cache_gib: int = 1
    arguments: Sequence[str] = ()
    """Further arguments of `vllm serve`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""


class VllmServer:
    """A running `vllm serve`; use it as a context manager.

    Its log and the encoder probe's log lie in `workdir`, and are appended to when a server is started there again.
    """

    def __init__(self, model: Path, workdir: Path, options: ServerOptions | None = None) -> None:
        self.options = options or ServerOptions()
        self.model = model
        self.workdir = workdir
        self.log_path = workdir / "server.log"
        self.probe_path = workdir / "encoder_probe.jsonl"
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._baseline = 0

    @property
    def base_url(self) -> str:
        """The address of the server on loopback."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pids(self) -> list[int]:
        """The living processes of the server: API server, engine core and workers."""
        return [] if self._process is None else [member.pid for member in processes.family(self._process)]

    def start(self, deadline_s: float = 600.0, progress: Callable[[str], None] | None = None) -> Self:
        """Start the server and return once it is healthy, telling `progress` every ten seconds that it still waits.

        Raises:
            EngineStartError: it ended, or `deadline_s` seconds passed; nothing of it is left running.
        """
        self.workdir.mkdir(parents=True, exist_ok=True)
        self.port = _free_port()
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), cwd=self.workdir, env=self._environment(), stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            self._wait_until_healthy(deadline_s, progress)
        except BaseException:
            self.kill()
            raise
        # The runner encodes made-up items while it measures memory; they are not counted.
        self._baseline = len(read_events(self.probe_path))
        return self

    def stop(self, grace_s: float = 15.0) -> bool:
        """Ask the server to end, and kill what is left after `grace_s` seconds; return True if nothing was killed."""
        process, self._process = self._process, None
        return process is None or processes.end(process, grace_s)

    def kill(self) -> None:
        """Kill all its processes at once, as a crash would."""
        self.stop(grace_s=0.0)

    def chat(
        self,
        text: str = "Describe what you see.",
        *,
        images: Sequence[bytes] = (),
        video: bytes | None = None,
        uuids: Sequence[str | None] = (),
        max_tokens: int = 8,
        timeout_s: float = 120.0,
        **body: Any,
    ) -> Answer:
        """Ask about pictures (JPEG bytes) and a clip (MP4 bytes), greedily; `body` holds further request fields.

        Raises:
            client.ServerError: the server refused, or broke off its answer.
            httpx.HTTPError: the connection failed, or `timeout_s` seconds passed without a byte.
        """
        request = {
            "model": str(self.model),
            "messages": client.messages(text, images, video, uuids),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "top_logprobs": 3,
        }
        return client.ask(self.base_url, request | body, timeout_s)

    def events(self, kind: str | None = None, rank: int | None = 0) -> list[ProbeEvent]:
        """Return the probe's events since this start; of one `kind` and one tensor-parallel `rank`, unless None."""
        found = read_events(self.probe_path)[self._baseline :]
        return [event for event in found if kind in (None, event.kind) and rank in (None, event.rank)]

    def encoder_runs(self) -> int:
        """Return how many items the vision tower has encoded since this start, on rank 0."""
        return len(self.events("encoded"))

    def log(self) -> str:
        """Return the server's log since this start."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def metrics(self) -> str:
        """Return the text of `/metrics`.

        Raises:
            httpx.HTTPError: the server does not answer.
        """
        return httpx.get(f"{self.base_url}/metrics", timeout=30.0).raise_for_status().text

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _command(self) -> list[str]:
        """Return the command line."""
        options = self.options
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(self.model)]
        arguments = {
            "--host": "127.0.0.1",
            "--port": self.port,
            "--max-model-len": options.max_model_len,
            "--max-num-batched-tokens": options.encoder_budget,
            "--max-num-seqs": 8,
            "--tensor-parallel-size": options.tensor_parallel,
            "--limit-mm-per-prompt": {"image": 3, "video": 1},
            "--media-io-kwargs": {"video": {"num_frames": options.video_frames, "fps": -1}},
            "--worker-extension-cls": f"{EncoderProbe.__module__}.{EncoderProbe.__qualname__}",
            "--seed": 0,
        }
        if options.ec_transfer_config is not None:
            arguments["--ec-transfer-config"] = dict(options.ec_transfer_config)
        for name, value in arguments.items():
            command += [name, json.dumps(value) if isinstance(value, dict) else str(value)]
        # Without prefix caching a repeated prompt is computed again, so the encoder cache alone decides the time.
        return [*command, "--enforce-eager", "--no-enable-prefix-caching", *options.arguments]

    def _environment(self) -> dict[str, str]:
        """Return the environment of the server."""
        variables = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(self.options.kv_cache_gib),
            "PYTHONUNBUFFERED": "1",
            LOG_VARIABLE: str(self.probe_path.resolve()),
        }
        if self.options.tensor_parallel > 1:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(self.options.tensor_parallel)))
        paths = [str(ROOT), self.options.environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
        path = os.pathsep.join(filter(None, paths))
        return {**os.environ, **variables, **self.options.environment, "PYTHONPATH": path}

    def _wait_until_healthy(self, deadline_s: float, progress: Callable[[str], None] | None) -> None:
        """Return once `/health` answers.

        Raises:
            EngineStartError: the process ended, or `deadline_s` seconds passed.
        """
        started = told = time.monotonic()
        while True:
            assert self._process is not None
            now = time.monotonic()
            if self._process.poll() is not None:
                raise EngineStartError(f"vllm serve ended with {self._process.returncode}:\n{self.log()[-6000:]}")
            if _healthy(self.base_url):
                return
            if now - started > deadline_s:
                raise EngineStartError(f"not healthy after {deadline_s:.0f} s:\n{self.log()[-6000:]}")
            if progress is not None and now - told > _PROGRESS_SECONDS:
                told = now
                progress(f"waiting for vllm serve: {now - started:.0f} s so far")
            time.sleep(0.2)


def _healthy(base_url: str) -> bool:
    """Return True if the server at `base_url` answers its health check."""
    try:
        return httpx.get(f"{base_url}/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    """Return a port on loopback that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
