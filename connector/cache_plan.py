# SPDX-License-Identifier: Apache-2.0
"""How much an encoder cache holds, worked out before anything is started: `ec-cache plan`.

A model's `config.json` gives the bytes of a token and the tokens of a picture, the settings the sizes of the tiers.
Arithmetic on these and one file to read: no vLLM, no network, no printing may enter.
"""

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from connector.block_geometry import BlockGeometry
from connector.settings import Settings, in_words
from storage_tiers.file_format import BLOCK_BYTES, padded_bytes

__all__ = [
    "DEFAULT_ITEMS",
    "CachePlan",
    "EncoderShape",
    "ItemPlan",
    "ItemSize",
    "PlanError",
    "TierSizes",
    "describe",
    "plan_for",
    "read_encoder",
    "sizes_of",
]

DEFAULT_ITEMS = ("512x512", "1024x1024", "video:8x448x448")
"""What is planned for where nobody says what comes."""

_BF16_BYTES = 2
_ITEM = re.compile(r"(?:video:(?P<frames>\d{1,9})x)?(?P<width>\d{1,9})x(?P<height>\d{1,9})", re.ASCII)
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


class PlanError(ValueError):
    """Something is missing or cannot be read; the message names it and what to do."""


@dataclass(frozen=True, slots=True)
class ItemSize:
    """A picture, or a video of `frames` frames, in pixels."""

    name: str
    """As the user wrote it."""
    width: int
    height: int
    frames: int | None = None
    """Frames that the model is given; None for a picture."""

    @classmethod
    def parsed(cls, text: str) -> "ItemSize":
        """The item that `text` means: 1024x1024, video:8x448x448. Raises PlanError."""
        match = _ITEM.fullmatch(text)
        numbers = {name: int(value) for name, value in match.groupdict().items() if value} if match else {}
        if not numbers or 0 in numbers.values():
            raise PlanError(
                f"item {text!r} cannot be read; write WIDTHxHEIGHT in pixels, as 1024x1024, or "
                "video:FRAMESxWIDTHxHEIGHT, as video:8x448x448"
            )
        return cls(text, **numbers)


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """What of a vision encoder decides the size of its outputs."""

    out_hidden_size: int
    """Columns that one level gives."""
    deepstack_levels: int
    """Levels that are concatenated to the last one."""
    patch_size: int
    """Pixels of a patch's side."""
    spatial_merge_size: int
    """Patches of a token's side."""
    temporal_patch_size: int | None
    """Frames of a token; None where the configuration does not say."""

    @property
    def width(self) -> int:
        """Columns of a token's embedding."""
        return self.out_hidden_size * (1 + self.deepstack_levels)

    @property
    def bytes_per_token(self) -> int:
        """In bf16."""
        return self.width * _BF16_BYTES

    @property
    def pixels(self) -> int:
        """Pixels of a token's side."""
        return self.patch_size * self.spatial_merge_size

    def tokens_of(self, item: ItemSize) -> int:
        """Tokens of `item`, each side rounded to whole tokens as Qwen's processors do.

        What these do besides is not looked at: they scale items beyond their least and most pixels, and sample frames.
        Raises PlanError for a video where the frames of a token are not known.
        """
        area = max(1, round(item.width / self.pixels)) * max(1, round(item.height / self.pixels))
        if item.frames is None:
            return area
        if self.temporal_patch_size is None:
            raise PlanError(
                f"vision_config has no temporal_patch_size, without which the tokens of {item.name} are not known; "
                "leave videos out with --item 1024x1024, or name a copy of config.json that has it"
            )
        return -(-item.frames // self.temporal_patch_size) * area


@dataclass(frozen=True, slots=True)
class TierSizes:
    """What each tier may take."""

    block_size: int
    """Tokens of a device block."""
    num_blocks: int | None
    """Device blocks with the scratch block; None: as many as vLLM's encoder cache budget needs."""
    pool_bytes: int
    """Per engine and host."""
    lease_bytes: int
    """Of these, what requests may hold at once: a larger item is never served."""
    disk_bytes: int
    """Of the whole directory; 0 without a disk tier."""


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """One kind of item: what it takes, and how many of it each tier holds when it holds nothing else."""

    name: str
    tokens: int
    blocks: int
    """Device blocks."""
    payload_bytes: int
    """Of its embeddings."""
    device: int | None
    """None where nobody has said how many blocks there are."""
    pool: int
    disk: int | None
    """None without a disk tier."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """All that was worked out."""

    model: str
    encoder: EncoderShape
    tiers: TierSizes
    items: tuple[ItemPlan, ...]
    problems: tuple[str, ...]
    """What a tier cannot hold or never serves, and what to do."""
    flags: tuple[str, ...]
    """Arguments for `vllm serve` after the model, not quoted."""

    @property
    def block_bytes(self) -> int:
        """Of one device block."""
        return self.tiers.block_size * self.encoder.bytes_per_token

    @property
    def device_bytes(self) -> int | None:
        """Of all device blocks, on each rank; None where their number is not set."""
        return None if self.tiers.num_blocks is None else self.tiers.num_blocks * self.block_bytes

    @property
    def command(self) -> str:
        """The command line with the flags, to paste into a shell."""
        pairs = [f"{name} {shlex.quote(value)}" for name, value in zip(self.flags[::2], self.flags[1::2], strict=True)]
        return " \\\n  ".join([f"vllm serve {shlex.quote(self.model)}", *pairs])

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain types; sizes in bytes."""
        sums = {"bytes_per_token": self.encoder.bytes_per_token, "block_bytes": self.block_bytes}
        return asdict(self) | sums | {"device_bytes": self.device_bytes, "command": self.command}


def read_encoder(model: str, environ: Mapping[str, str] = os.environ) -> EncoderShape:
    """The encoder of `model`: a directory, a config.json, or a name in the local Hugging Face cache.

    Nothing is fetched. Raises PlanError for what is missing, OSError for a file that cannot be read.
    """
    path = _config_path(model, environ)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(f"{path} is no JSON ({error}); name a model's config.json") from error
    vision = config.get("vision_config") if isinstance(config, dict) else None
    if not isinstance(vision, dict):
        raise PlanError(
            f"{path} has no vision_config; name a model with a vision encoder, such as Qwen/Qwen3-VL-8B-Instruct: no "
            "other has outputs of an encoder to keep"
        )
    deepstack = vision.get("deepstack_visual_indexes") or []
    if not isinstance(deepstack, list):
        raise _bad_value(path, "deepstack_visual_indexes", deepstack, "a list of layers")
    text = config.get("text_config")
    # As connector.vllm_versions does it: a tower that does not say so is as wide as the language model.
    widths = {"out_hidden_size": vision.get("out_hidden_size")} | {
        "hidden_size": (text if isinstance(text, dict) else config).get("hidden_size")
    }
    width_key = next((key for key, value in widths.items() if value is not None), "out_hidden_size")
    return EncoderShape(
        out_hidden_size=_positive(path, widths, width_key),
        deepstack_levels=len(deepstack),
        patch_size=_positive(path, vision, "patch_size"),
        spatial_merge_size=_positive(path, vision, "spatial_merge_size"),
        temporal_patch_size=_positive(path, vision, "temporal_patch_size") if "temporal_patch_size" in vision else None,
    )


def sizes_of(settings: Settings, block_size: int | None = None, num_blocks: int | None = None) -> TierSizes:
    """The tiers that `settings` make, with other device blocks where these are given."""
    storage, behaviour = settings.storage, settings.behaviour
    return TierSizes(
        block_size=behaviour.device_block_size if block_size is None else block_size,
        num_blocks=behaviour.device_num_blocks if num_blocks is None else num_blocks,
        pool_bytes=storage.pool_bytes,
        lease_bytes=int(storage.pool_bytes * behaviour.max_lease_fraction),
        disk_bytes=storage.disk_bytes,
    )


def plan_for(
    model: str, encoder: EncoderShape, tiers: TierSizes, items: Iterable[str], extra_config: Mapping[str, Any]
) -> CachePlan:
    """The plan for `items`, in the user's words, on `tiers`, for `model` as `read_encoder` was given it.

    `extra_config` is what the flags must say of the connector beside its name; what is None in it is left out. Raises
    PlanError for an item that cannot be read.
    """
    plans = tuple(_item_plan(ItemSize.parsed(text), encoder, tiers) for text in items)
    path = _local(model)
    served = model
    if path.is_file():
        served = str(path.parent) if path.name == "config.json" else "MODEL"
    problems = tuple(problem for item in plans for problem in _problems(item, tiers))
    return CachePlan(served, encoder, tiers, plans, problems, _flags(extra_config))


def describe(plan: CachePlan) -> tuple[list[str], list[str], list[list[str]]]:
    """The plan for people: lines on token and tiers, then titles and rows of a table of the items."""
    encoder, tiers = plan.encoder, plan.tiers
    levels = f" x (1 + {encoder.deepstack_levels} deepstack levels)" if encoder.deepstack_levels else ""
    blocks = f"{in_words('block_bytes', plan.block_bytes)} per block of {tiers.block_size} tokens"
    if tiers.num_blocks is None:
        device = f"{blocks}; as many as vLLM's encoder cache budget needs, or --num-blocks"
    else:
        total = in_words("device_bytes", plan.device_bytes)
        device = f"{total} per rank: {tiers.num_blocks} blocks, one of them scratch, {blocks}"
    heads = [
        f"token   {in_words('token_bytes', encoder.bytes_per_token)}: {encoder.out_hidden_size}{levels} x 2 bytes "
        f"(bf16), for {encoder.pixels} x {encoder.pixels} pixels",
        f"device  {device}",
        f"pool    {in_words('pool_bytes', tiers.pool_bytes)} per engine and host",
        f"disk    {in_words('disk_bytes', tiers.disk_bytes) + ' per directory' if tiers.disk_bytes else 'none'}",
    ]
    rows = [
        [
            item.name,
            f"{item.tokens:,}",
            f"{item.blocks:,}",
            in_words("payload_bytes", item.payload_bytes),
            *("-" if count is None else f"{count:,}" for count in (item.device, item.pool, item.disk)),
        ]
        for item in plan.items
    ]
    return heads, ["item", "tokens", "blocks", "bytes", "device holds", "pool holds", "disk holds"], rows


def _item_plan(item: ItemSize, encoder: EncoderShape, tiers: TierSizes) -> ItemPlan:
    tokens = encoder.tokens_of(item)
    nbytes = tokens * encoder.bytes_per_token
    geometry = BlockGeometry(tiers.block_size, tiers.num_blocks or 1)
    blocks = geometry.blocks_for(tokens)
    return ItemPlan(
        name=item.name,
        tokens=tokens,
        blocks=blocks,
        payload_bytes=nbytes,
        device=None if tiers.num_blocks is None else geometry.capacity_blocks // blocks,
        pool=tiers.pool_bytes // padded_bytes(nbytes),
        # A trailer takes one block, but for names of thousands of letters.
        disk=tiers.disk_bytes // (padded_bytes(nbytes) + BLOCK_BYTES) if tiers.disk_bytes else None,
    )


def _problems(item: ItemPlan, tiers: TierSizes) -> list[str]:
    """What `item` is too large for, with what would hold it."""
    found = []
    if item.device == 0:
        found.append(
            f"{item.name} takes {item.blocks} device blocks, and there are {(tiers.num_blocks or 1) - 1} beside the "
            f"scratch block: it is not kept on the device; set --num-blocks {item.blocks + 1} or more"
        )
    # Of the pool it is the share for requests that decides: what is larger is stored and never loaded.
    if item.payload_bytes > tiers.lease_bytes:
        found.append(
            f"{item.name} is larger than what requests may hold of the pool ({in_words('x_bytes', tiers.lease_bytes)}):"
            " it is never loaded; raise max_local_cpu_size, or ec.max_lease_fraction under extra_config"
        )
    if item.disk == 0:
        found.append(f"{item.name} is larger than the disk tier; raise max_local_disk_size")
    return found


def _flags(extra_config: Mapping[str, Any]) -> tuple[str, ...]:
    """What to pass to `vllm serve`, both flags for device blocks included."""
    extra = {key: value for key, value in extra_config.items() if value is not None}
    transfer: dict[str, Any] = {"ec_connector": "LMCacheNeuronECConnector", "ec_role": "ec_both"}
    if extra:
        transfer["ec_connector_extra_config"] = extra
    manager = {"encoder_cache_manager_cls": "connector.BlockAwareEncoderCacheManager"}
    return (
        "--ec-transfer-config",
        json.dumps(transfer),
        "--worker-cls",
        "connector.workers.BlockCacheWorker",
        "--ec-manager-config",
        json.dumps(manager),
    )


def _config_path(model: str, environ: Mapping[str, str]) -> Path:
    """The config.json that `model` means. Raises PlanError."""
    path = _local(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise PlanError(f"{path} has no config.json; name the directory of a model, or a config.json")
        return path / "config.json"
    if path.exists():
        return path
    if not _REPOSITORY.fullmatch(model):
        raise PlanError(f"{path} does not exist; name the directory of a model, its config.json, or a cached model")
    hub = _hub_cache(environ)
    found = _cached_config(hub / f"models--{model.replace('/', '--')}")
    if found is None:
        raise PlanError(
            f"{model} is no file or directory here, and {hub} has no config.json of it; name a directory with its "
            f"config.json, or fetch that first: hf download {model} config.json"
        )
    return found


def _local(model: str) -> Path:
    """`model` as a path, which may not exist; a shell expands a ~ only at the beginning of a word."""
    try:
        return Path(model).expanduser()
    except RuntimeError:  # there is no such user
        return Path(model)


def _hub_cache(environ: Mapping[str, str]) -> Path:
    """Where Hugging Face's library keeps what it has fetched."""
    hub = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    if hub:
        return Path(hub).expanduser()
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def _cached_config(repository: Path) -> Path | None:
    """The config.json of the main branch in a cached repository, else of the youngest snapshot that has one."""
    reference = repository / "refs" / "main"
    if reference.is_file():
        main = repository / "snapshots" / reference.read_text(encoding="utf-8").strip() / "config.json"
        if main.is_file():
            return main
    configs = repository.glob("snapshots/*/config.json")
    return max((path for path in configs if path.is_file()), key=lambda path: path.stat().st_mtime, default=None)


def _positive(path: Path, values: Mapping[str, Any], key: str) -> int:
    """The positive integer under `key`. Raises PlanError that names the file, the key and what to do."""
    value = values.get(key)
    if value is None:
        raise PlanError(
            f"{path} has no {key} in its vision_config. A plan needs an encoder of Qwen's kind, with a token for each "
            f"square of pixels; if this is one, write {key} into a copy of config.json and name that"
        )
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise _bad_value(path, key, value, "an integer above 0")
    return value


def _bad_value(path: Path, key: str, value: object, allowed: str) -> PlanError:
    return PlanError(f"{path}: {key} = {value!r} in vision_config cannot be used; allowed is {allowed}")
