"""LoRA adapters: what each adds to the products of a model, for the rows of a step that want it.

Owns the files (PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``), how many adapters are kept,
and the arithmetic: a product of a row becomes ``x @ W.T + scale * (x @ A.T) @ B.T``, adapter by adapter, so that a
batch may have several and rows without one cost nothing. Which module a weight belongs to is said by the forward pass.
Must not know attention, sampling or the scheduler.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from anyengine._wire import WireLoRARequest
from anyengine.engine.interfaces import ScheduledSequence
from anyengine.engine.runner.linear import LinearPart

__all__ = ["Adapters"]

_WEIGHT = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])\.weight")


class _Config(msgspec.Struct, kw_only=True):
    """``adapter_config.json``, as far as it changes what is computed."""

    peft_type: str = ""
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    alpha_pattern: dict[str, float] = {}
    bias: str = "none"
    use_dora: bool = False
    lora_bias: bool = False
    modules_to_save: list[str] | None = None

    def check(self) -> None:
        """Raises ValueError for what is more than LoRA on linear layers."""
        if self.peft_type != "LORA":
            raise ValueError(f"peft_type is {self.peft_type!r}: only 'LORA' is served")
        for name, usual in (("bias", "none"), ("use_dora", False), ("lora_bias", False)):
            if getattr(self, name) != usual:
                raise ValueError(f"{name}={getattr(self, name)!r} is not served, only {usual!r}")
        if self.modules_to_save:
            raise ValueError(f"modules_to_save={self.modules_to_save!r} is not served: an adapter has no whole modules")

    def scale_of(self, module: str, rank: int) -> float:
        """PEFT: the first pattern that names the module, or the end of its path."""
        fitting = (p for p in self.alpha_pattern if re.fullmatch(rf"(.*\.)?({p})", module))
        key = next(fitting, None)
        alpha = self.lora_alpha if key is None else self.alpha_pattern[key]
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(slots=True, eq=False)
class _Adapter:
    """One that is loaded. Requests that use it keep it, whatever becomes of its place."""

    request: WireLoRARequest
    key: bytes
    halves: dict[str, tuple[Tensor, Tensor]]
    """By the name of a product: A [rank, in] and scaled B [out, rank], of all its parts together."""
    is_pinned: bool = False


@dataclass(slots=True)
class _Rows:
    """Which rows of the present step are whose; ``None``: all of them."""

    groups: list[tuple[Tensor | None, _Adapter]] = field(default_factory=list)


class _Addition:
    """What is added to one product. See :attr:`~.linear.Linear.addition`."""

    def __init__(self, name: str, rows: _Rows) -> None:
        self._name = name
        self._rows = rows

    def __call__(self, x: Tensor, product: Tensor) -> Tensor:
        """``product`` [..., out] of ``x`` [..., in], changed in place."""
        for rows, adapter in self._rows.groups:
            halves = adapter.halves.get(self._name)
            if halves is None:
                continue
            down, up = halves
            flat = x.reshape(-1, x.shape[-1])  # [num_tokens, in]
            result = product.view(-1, product.shape[-1])  # [num_tokens, out]
            if rows is None:
                result.addmm_(flat @ down.T, up.T)
            else:
                result.index_add_(0, rows, (flat[rows] @ down.T) @ up.T)
        return product


class Adapters:
    """Those that are loaded, at most ``max_loras``: the one that was used longest ago goes for a new one, unless it is
    pinned. One thread."""

    def __init__(self, parts: Mapping[str, LinearPart], max_loras: int, like: Tensor) -> None:
        self.max_loras = max_loras
        self._like = like
        self._loaded: OrderedDict[int, _Adapter] = OrderedDict()  # in the order of use, the latest last
        self._used: dict[str, _Adapter] = {}  # by request
        self._num_loads = 0
        self._rows = _Rows()
        self.bind(parts)

    def bind(self, parts: Mapping[str, LinearPart]) -> None:
        """The products of these modules are the model's from now on. Without any, its weights are asleep."""
        self._parts = parts
        self._names = {
            id(part.linear): name for name, part in reversed(list(parts.items()))
        }  # of the first part of each
        if self.max_loras:
            for part in parts.values():
                part.linear.addition = _Addition(self._names[id(part.linear)], self._rows)

    def add(self, request: WireLoRARequest) -> bytes:
        """Load an adapter, unless it is there. What keys and values computed with it depend on.

        Raises:
            ValueError: it is none that can be served, its id is another's, or there is no room.
        """
        if not self.max_loras:
            raise ValueError("this engine has no room for LoRA adapters: start it with max_loras=1 or more")
        if not self._parts:
            raise ValueError("the weights that an adapter would change are asleep: wake_up first")
        known = self._loaded.get(request.lora_int_id)
        if known is not None and not request.load_inplace:
            if known.request.lora_path != request.lora_path:
                raise ValueError(
                    f"lora_int_id={request.lora_int_id} is the adapter from {known.request.lora_path!r}: remove it, "
                    "use another id, or load_inplace"
                )
            self._loaded.move_to_end(request.lora_int_id)
            return known.key
        loaded = self._load(request)
        if known is not None:
            loaded.is_pinned = known.is_pinned
        else:
            self._make_room()
        self._loaded[request.lora_int_id] = loaded
        self._loaded.move_to_end(request.lora_int_id)
        return loaded.key

    def remove(self, lora_id: int) -> bool:
        """Whether it was there. Requests that use it go on with it."""
        return self._loaded.pop(lora_id, None) is not None

    def pin(self, lora_id: int) -> bool:
        """Never let it go for another one.

        Raises:
            ValueError: it is not loaded.
        """
        adapter = self._loaded.get(lora_id)
        if adapter is None:
            raise ValueError(f"no LoRA adapter {lora_id} is loaded; there are {self.ids()}")
        adapter.is_pinned = True
        return True

    def ids(self) -> list[int]:
        return sorted(self._loaded)

    def use(self, request_id: str, lora_id: int) -> None:
        """``request_id`` computes with it, to its end."""
        self._used[request_id] = self._loaded[lora_id]

    def finish(self, request_id: str) -> None:
        self._used.pop(request_id, None)

    @property
    def is_idle(self) -> bool:
        """Whether the next pass has no rows of any adapter."""
        return not self._rows.groups

    def place(self, items: Sequence[ScheduledSequence], ends: Sequence[int]) -> None:
        """Whose rows the next pass has: those of each of ``items`` end before the row in ``ends``."""
        if not self._used:
            self._rows.groups = []
            return
        rows_of: dict[_Adapter, list[int]] = {}
        for item, end in zip(items, ends, strict=True):
            if (adapter := self._used.get(item.seq.request_id)) is not None:
                rows_of.setdefault(adapter, []).extend(range(end - item.num_new_tokens, end))
        self._rows.groups = [
            (None if len(rows) == ends[-1] else torch.tensor(rows, device=self._like.device), adapter)
            for adapter, rows in rows_of.items()
        ]

    def _make_room(self) -> None:
        if len(self._loaded) < self.max_loras:
            return
        oldest = next((lora_id for lora_id, adapter in self._loaded.items() if not adapter.is_pinned), None)
        if oldest is None:
            raise ValueError(f"all of max_loras={self.max_loras} adapters are pinned: remove one")
        del self._loaded[oldest]

    def _load(self, request: WireLoRARequest) -> _Adapter:
        try:
            config, weights = _read(Path(request.lora_path))
            config.check()
            halves = self._halves(config, weights)
        except (OSError, ValueError) as exc:
            raise ValueError(f"LoRA adapter {request.lora_name!r} from {request.lora_path!r}: {exc}") from exc
        self._num_loads += 1
        return _Adapter(request, b"%d" % self._num_loads, halves)

    def _halves(self, config: _Config, weights: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """What ``weights`` add to each product: parts that are computed together stand beside each other."""
        found: dict[str, list[tuple[LinearPart, Tensor, Tensor]]] = {}
        for module, (a, b) in _pairs(weights).items():
            part = self._parts.get(module)
            if part is None:
                raise ValueError(
                    f"it changes {module!r}, which is no linear layer of this model, or none that is served"
                )
            rank = len(a)
            if a.shape != (rank, part.linear.in_features) or b.shape != (part.num_rows, rank):
                raise ValueError(
                    f"its weights for {module!r} have the shapes {[*a.shape]} and {[*b.shape]}, not the model's"
                )
            scaled = b.float() * config.scale_of(module, rank)
            found.setdefault(self._names[id(part.linear)], []).append((part, a, scaled))
        return {name: self._joined(parts) for name, parts in found.items()}

    def _joined(self, parts: Sequence[tuple[LinearPart, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        linear = parts[0][0].linear
        down = torch.cat([a for _, a, _ in parts]).to(self._like)  # [sum of ranks, in]
        up = torch.zeros(linear.out_features, len(down))
        first = 0
        for part, a, b in parts:
            up[part.first_row : part.first_row + part.num_rows, first : first + len(a)] = b
            first += len(a)
        return down, up.to(self._like)


def _read(directory: Path) -> tuple[_Config, dict[str, Tensor]]:
    """Raises OSError or ValueError."""
    try:
        config = msgspec.json.decode((directory / "adapter_config.json").read_bytes(), type=_Config)
    except msgspec.DecodeError as exc:
        raise ValueError(f"adapter_config.json: {exc}") from exc
    weights = directory / "adapter_model.safetensors"
    if not weights.is_file():
        raise ValueError("there is no adapter_model.safetensors (weights in pickle files are not read)")
    try:
        return config, load_file(weights)
    except Exception as exc:
        raise ValueError(f"adapter_model.safetensors: {exc}") from exc


def _pairs(weights: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each module."""
    halves: dict[str, dict[str, Any]] = {}
    for name, weight in weights.items():
        match = _WEIGHT.fullmatch(name)
        if match is None:
            raise ValueError(f"it has {name!r}, which is not a LoRA weight of a linear layer")
        halves.setdefault(match["module"], {})[match["half"]] = weight
    if lonely := [module for module, both in halves.items() if len(both) < 2]:
        raise ValueError(f"{lonely[0]!r} has only one of its two weights")
    return {module: (both["A"], both["B"]) for module, both in halves.items()}
