"""LoRA adapters by name: what a client has had loaded, and what its requests may call by it.

Owns the public methods; which rank has which adapter is the connection's to know.
"""

from __future__ import annotations

from collections.abc import Mapping

from anyengine.params import LoRARequest

from .requests.desk import RequestDesk
from .weights import WeightOperations

__all__ = ["Adapters"]


class Adapters(WeightOperations):
    """Part of :class:`EngineClient`. Lifetime: the client's."""

    def _entered_desk(self) -> RequestDesk:
        raise NotImplementedError

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; whether it was there. The next request that names it has it loaded again."""
        self._entered_desk().adapters.forget(lora_id)
        return await super().remove_lora(lora_id)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter on every rank; whether it was. From then on requests may name it."""
        loaded = await super().add_lora(lora_request)
        if loaded:
            self._entered_desk().adapters.note_loaded(lora_request)
        return loaded

    @property
    def loras(self) -> Mapping[str, LoRARequest]:
        """The adapters that this client has had loaded, by name; what a server offers as models of their own."""
        return dict(self._entered_desk().adapters.named)
