# SPDX-License-Identifier: Apache-2.0
"""Videos, and processed items that hold the grid by which vllm-neuron packs a video's frames into blocks."""

from dataclasses import dataclass

import torch
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem, MultiModalSharedField

from tests.scheduler.items import Image, kwargs_item

MERGE_SIDE = 2
"""So many patches by so many make one embedding."""


@dataclass(frozen=True)
class Video(Image):
    """A video. Its `rows` must be those of all frames: see `video`."""

    frames: int = 1
    frame_tokens: int = 8


def video(name: str, frames: int, frame_tokens: int) -> Video:
    return Video(name, rows=frames * frame_tokens, modality="video", frames=frames, frame_tokens=frame_tokens)


def kwargs_of(image: Image) -> MultiModalKwargsItem:
    """The processed item of either modality, with a grid `[frames, height, width]` in patches. For `EngineLoop.add`."""
    frames, frame_tokens = (image.frames, image.frame_tokens) if isinstance(image, Video) else (1, image.rows)
    grid = torch.tensor([frames, MERGE_SIDE, MERGE_SIDE * frame_tokens])
    elems = {name: elem for name, elem in kwargs_item(image).items() if name != "image_grid_thw"}
    elems[f"{image.modality}_grid_thw"] = MultiModalFieldElem(data=grid, field=MultiModalSharedField(batch_size=1))
    return MultiModalKwargsItem(elems)
