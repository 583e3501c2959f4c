"""What must be so in an engine before a request is sent.

Owns two things that only utility calls can tell: which tasks the model has, and that an adapter can be loaded. A
request for a task that it does not have, or with an adapter that it cannot load, ends a vLLM engine; the calls only
fail.
"""

from __future__ import annotations

import anyio

from anyengine._client.core_client import EngineCoreClient
from anyengine._wire import lora_to_wire
from anyengine.exceptions import RequestRejected, UtilityError
from anyengine.params import LoRARequest

from .engine_limits import learn_tasks

__all__ = ["EngineReadiness"]


class EngineReadiness:
    """See the module. Lifetime: one session. What is learnt or loaded holds for every rank."""

    def __init__(self, core: EngineCoreClient) -> None:
        self._core = core
        self._asking = anyio.Lock()
        self._asked: bool = False
        self._loading = anyio.Lock()
        self._loaded: dict[LoRARequest, None] = {}  # in the order of use, the latest last
        self._holders: dict[int, LoRARequest] = {}  # by adapter id: whom the engine takes it for
        self.named: dict[str, LoRARequest] = {}
        """The adapters that were loaded and not removed, by name."""

    async def learn_tasks(self) -> None:
        """Ask the engines that were not asked yet for their tasks, once; one that does not tell is taken for one that
        generates.

        Raises:
            EngineDeadError: the engine died, or the client is closed.

        Cancellation: the next request asks.
        """
        if self._asked:
            return
        async with self._asking:
            if not self._asked:  # another request may have, meanwhile
                session = self._core.usable_session()
                await learn_tasks(session)
                self._asked = bool(session.connection.rota.serving)  # else there was nobody to ask

    def check_asked(self) -> None:
        """Refuse what needs to know an engine's tasks where none can be asked.

        Raises:
            EngineDeadError: every engine is dying or dead, or the client is closed.
        """
        session = self._core.usable_session()
        if not session.connection.rota.serving and (dying := session.burials.untold):
            raise session.burials.death(dying[0])

    def has_loaded(self, adapter: LoRARequest) -> bool:
        """Whether the engine has surely loaded it: it keeps those that were used last, as many as it has room for."""
        if adapter not in self._loaded or not self.is_everywhere(adapter):
            return False
        self._loaded[adapter] = self._loaded.pop(adapter)
        return True

    def is_everywhere(self, adapter: LoRARequest) -> bool:
        """Whether every rank that takes requests has confirmed that it loaded it: somebody may have removed it by a
        call of their own, and an engine that was started again has none."""
        known = self._core.session.connection.adapters
        return all(known.of(rank).get(adapter.lora_int_id) == adapter.lora_path for rank in self._core.ranks)

    async def load(self, adapter: LoRARequest, room: int) -> None:
        """Have the engine load it; ``room`` is how many it keeps at least. Of many who want it at once, one calls.

        Raises:
            RequestRejected: it cannot.
            EngineDeadError: the engine died, or the client is closed.

        Cancellation: the engine may load it all the same.
        """
        async with self._loading:
            if not self.has_loaded(adapter):  # another request may have had it loaded, meanwhile
                await self._load(adapter, room)

    async def _load(self, adapter: LoRARequest, room: int) -> None:
        holder = self._holders.get(adapter.lora_int_id)
        if holder is not None and holder.lora_path != adapter.lora_path and not adapter.load_inplace:
            # The engine would go by the id, and use what it has.
            raise RequestRejected(
                f"lora_int_id={adapter.lora_int_id} stands for the adapter {holder.lora_name!r} "
                f"from {holder.lora_path!r}",
                parameter="lora_request",
                value=adapter,
                remedy="use another id, remove_lora() before, or load_inplace=True to replace it",
            )
        try:
            await self._core.utility_on_all("add_lora", lora_to_wire(adapter))
        except UtilityError as exc:
            raise RequestRejected(
                f"the engine cannot load the LoRA adapter {adapter.lora_name!r} from {adapter.lora_path!r}: {exc}",
                parameter="lora_request",
                value=adapter,
                remedy="check the path (on the engine's machine), the rank and the target modules",
            ) from exc
        self.note_loaded(adapter)
        while len(self._loaded) > room:
            del self._loaded[next(iter(self._loaded))]

    def note_loaded(self, adapter: LoRARequest) -> None:
        """The engine has loaded it, whoever asked."""
        self.forget(adapter.lora_int_id)
        if not adapter.load_inplace:  # else it asks for a reload, every time
            self._loaded[adapter] = None
        self._holders[adapter.lora_int_id] = adapter
        self.named[adapter.lora_name] = adapter

    def by_name(self, name: str) -> LoRARequest:
        """The adapter of this name.

        Raises:
            RequestRejected: none of this name has been loaded.
        """
        if name in self.named:
            return self.named[name]
        known = ", ".join(map(repr, self.named)) or "none"
        refusal = RequestRejected(
            f"lora_request={name!r}: no adapter of this name has been loaded; loaded: {known}",
            parameter="lora_request",
            value=name,
            remedy="load it with add_lora(), or give the LoRARequest",
        )
        refusal.status = 404  # it is no bad name, but that of something which is not there
        raise refusal

    def forget(self, lora_id: int) -> None:
        """It is unloaded, or replaced by another one of the same id."""
        self._holders.pop(lora_id, None)
        for name in [name for name, adapter in self.named.items() if adapter.lora_int_id == lora_id]:
            del self.named[name]
        for adapter in [adapter for adapter in self._loaded if adapter.lora_int_id == lora_id]:
            del self._loaded[adapter]
