# SPDX-License-Identifier: Apache-2.0
"""Ask a server through its OpenAI-compatible API, and measure the answer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.engine.media import image_part, video_part


class ServerError(RuntimeError):
    """The server refused a request or broke off its answer."""


@dataclass(frozen=True)
class Answer:
    """One answer, as streamed."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    """Natural logarithm of each token's probability."""
    top_logprobs: tuple[tuple[tuple[str, float], ...], ...]
    """For each token, the most probable ones at its place, with their log-probabilities."""
    ttft_s: float
    """Seconds from sending the request to the first token."""
    total_s: float
    """Seconds from sending the request to the end of the answer."""

    def same_as(self, other: Answer) -> bool:
        """Return True if text and all log-probabilities are exactly those of `other`."""
        return (self.text, self.tokens, self.logprobs, self.top_logprobs) == (
            other.text,
            other.tokens,
            other.logprobs,
            other.top_logprobs,
        )


def messages(
    text: str,
    images: Sequence[bytes] = (),
    video: bytes | None = None,
    uuids: Sequence[str | None] = (),
) -> list[dict[str, Any]]:
    """Return the messages of a chat request: pictures first (JPEG bytes), then a clip (MP4 bytes), then the text.

    `uuids` are client ids for the media in that order; None leaves vLLM its content hash.
    """
    parts = [image_part(image) for image in images] + ([] if video is None else [video_part(video)])
    for part, uuid in zip(parts, uuids, strict=False):
        if uuid is not None:
            part["uuid"] = uuid
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def ask(base_url: str, body: dict[str, Any], timeout_s: float) -> Answer:
    """Send one chat request with streaming, and return its answer.

    Raises:
        ServerError: the server answered with an error, or with no token.
        httpx.HTTPError: the connection failed or `timeout_s` seconds passed without a byte.
    """
    body = body | {"stream": True, "logprobs": True}
    text: list[str] = []
    steps: list[dict[str, Any]] = []
    started, first = time.perf_counter(), 0.0
    with httpx.stream("POST", f"{base_url}/v1/chat/completions", json=body, timeout=timeout_s) as response:
        if response.status_code != 200:
            raise ServerError(f"{response.status_code}: {response.read().decode(errors='replace')[:2000]}")
        for event in _events(response):
            if "error" in event:
                raise ServerError(str(event["error"]))
            for choice in event.get("choices", ()):
                found = (choice.get("logprobs") or {}).get("content") or []
                if found and not steps:
                    first = time.perf_counter()
                steps += found
                text.append(choice["delta"].get("content") or "")
    if not steps:
        raise ServerError("the answer has no token")
    return Answer(
        text="".join(text),
        tokens=tuple(step["token"] for step in steps),
        logprobs=tuple(step["logprob"] for step in steps),
        top_logprobs=tuple(
            tuple((other["token"], other["logprob"]) for other in step.get("top_logprobs") or ()) for step in steps
        ),
        ttft_s=first - started,
        total_s=time.perf_counter() - started,
    )


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
