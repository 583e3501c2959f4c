"""Operations on the weights of the engines: what they are called, what they are, and others in their place.

Owns the calls and their order. Weights themselves never pass through a client: they go from a trainer to the engines'
workers, by a transfer engine of vLLM's (NCCL, CUDA IPC, ...), or lie in files.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from .operations import EngineOperations, refuse, refuse_unless

__all__ = ["TransferInfo", "WeightOperations"]

TransferInfo: TypeAlias = Mapping[str, Any]
"""Plain data for the transfer engine of the workers, in whose documentation its keys stand."""


class WeightOperations(EngineOperations):
    """The operations: see :class:`EngineOperations`.

    Pause the engines before they get other weights, with their caches cleared, and resume them when these are whole:
    requests would run on a mixture, and what was computed with the former weights would be found in the prefix cache.
    """

    async def update_weight_version(self, new_version: str) -> None:
        """Label the weights that are loaded now; outputs carry the label."""
        refuse_unless(str, "update_weight_version", "new_version", new_version, "use a str")
        await self._call("set_weight_version", new_version)

    async def get_weight_version(self) -> str | None:
        """The label of the weights."""
        optional_str: Any = str | None  # msgspec takes it, though it is no type[T]
        version: str | None = await self._agreed(optional_str, "get_weight_version")
        return version

    async def compute_weight_checksums(self) -> list[dict[str, str]]:
        """Checksums of the weights by name, for each worker in the order of ranks and workers."""
        results = await self._typed(list[dict[str, str]], "compute_weight_checksums")
        return [result for of_rank in results.values() for result in of_rank]

    async def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write each worker's weights to ``path``, a directory on the engine's host; ``max_size`` bytes a file."""
        await self._call("save_sharded_state", path, pattern, max_size)

    async def init_weight_transfer_engine(self, init_info: TransferInfo) -> None:
        """Have every worker meet the trainer, as ``init_info`` says."""
        refuse_unless(Mapping, "init_weight_transfer_engine", "init_info", init_info, "use a dict")
        await self.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": dict(init_info)})

    async def shutdown_weight_transfer_engine(self) -> None:
        """Have every worker leave the trainer; the engines go on with the weights that they have."""
        await self.collective_rpc("shutdown_weight_transfer_engine")

    async def start_weight_update(self) -> None:
        """Begin to replace the weights. :meth:`weight_update` does this and the end of it."""
        await self.collective_rpc("start_weight_update")

    async def start_draft_weight_update(self) -> None:
        """:meth:`start_weight_update`, for the draft model of speculative decoding."""
        await self.collective_rpc("start_draft_weight_update")

    async def update_weights(self, update_info: TransferInfo | Sequence[TransferInfo]) -> None:
        """Have every worker take the weights that ``update_info`` describes; returns when all have them. A list has an
        entry for each worker of all ranks, in their order (from 0.32 on)."""
        several = isinstance(update_info, Sequence) and not isinstance(update_info, str | bytes)
        parts: Any = update_info if several else (update_info,)
        if not parts:
            refuse("update_weights", "update_info", update_info, "is empty", "give an entry for each worker")
        for part in parts:
            refuse_unless(Mapping, "update_weights", "update_info", part, "use a dict, or a list of them")
        info = [dict(part) for part in parts]
        await self.collective_rpc("update_weights", kwargs={"update_info": info if several else info[0]})

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The weights are complete; ``weight_version`` labels them, if given. Adapters are unloaded by it, and loaded
        again for the next requests that name them."""
        if weight_version is not None:
            refuse_unless(str, "finish_weight_update", "weight_version", weight_version, "use a str")
        await self.collective_rpc("finish_weight_update")
        if weight_version is not None:
            await self.update_weight_version(weight_version)

    @asynccontextmanager
    async def weight_update(self, weight_version: str | None = None, *, draft: bool = False) -> AsyncIterator[None]:
        """:meth:`start_weight_update` (or that of the ``draft`` model) at the begin of a block, in which
        :meth:`update_weights` has the weights taken, and :meth:`finish_weight_update` at its end.

        Raises: see :class:`EngineOperations`. A block that is left by an exception does not finish the update: the
        weights are not whole, and the engines must not be resumed with them. vLLM takes a further update once
        :meth:`finish_weight_update` has ended this one, of workers that have not given it up by themselves.

        Cancellation: likewise.
        """
        if weight_version is not None:
            refuse_unless(str, "weight_update", "weight_version", weight_version, "use a str")
        await (self.start_draft_weight_update() if draft else self.start_weight_update())
        yield
        await self.finish_weight_update(weight_version)
