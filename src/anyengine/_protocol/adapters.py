"""Which LoRA adapters each engine is known to have loaded.

Owns the bookkeeping behind one rule of admission: a request may name an adapter only once the engine has confirmed
that it loaded it, since an engine that loads one for a request dies if it cannot (INTEROP §3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anyengine._wire import WireLoRARequest

from .utilities import PendingCall

__all__ = ["LoadedAdapters"]


class LoadedAdapters:
    """Rank -> adapter id -> path, as confirmed by the replies to ``add_lora``. An adapter counts as gone as soon as its
    removal is asked for, or the end of an update of the weights. An engine that evicts one to make room loads it again
    from the path that it knows."""

    def __init__(self) -> None:
        self._loaded: dict[int, dict[int, str]] = {}

    def of(self, rank: int) -> Mapping[int, str]:
        """What the engine of ``rank`` has loaded: id -> path."""
        return self._loaded.get(rank, {})

    def forget(self, rank: int) -> None:
        """The engine of ``rank`` is another one now."""
        self._loaded.pop(rank, None)

    def watch(self, call: PendingCall, args: Sequence[Any]) -> None:
        """Learn from a utility call that is about to be sent, and from its reply."""
        # Of this engine: should another one take its place before the reply is taken, nothing is learnt of that one.
        loaded = self._loaded.setdefault(call.rank, {})
        if call.method == "collective_rpc" and args and args[0] == "finish_weight_update":
            tell_all = call.on_done  # adapters are made for the weights below them: vLLM unloads them all

            def forget_all() -> None:
                loaded.clear()
                tell_all()

            loaded.clear()
            call.on_done = forget_all
        elif call.method == "remove_lora" and args:
            removed, on_done = args[0], call.on_done

            def forget() -> None:
                # Again: an add_lora that was sent before has been answered meanwhile.
                loaded.pop(removed, None)
                on_done()

            loaded.pop(removed, None)
            call.on_done = forget
        elif call.method == "add_lora" and args and isinstance(args[0], WireLoRARequest):
            adapter, tell = args[0], call.on_done

            def learn() -> None:
                if call.error is None:
                    loaded[adapter.lora_int_id] = adapter.lora_path
                tell()

            call.on_done = learn
