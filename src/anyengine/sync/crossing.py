"""How the outputs of one request stream come to a consumer in another thread.

Owns the hand-over of items. A pump in the client's loop waits for the stream, and a consumer in a thread for the pump:
an item that is waited for crosses once. A consumer that comes late rings for all that has arrived meanwhile, in one
item. Knows nothing of what an item is.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import anyio

from anyengine._client.requests.fan_out import Completions
from anyengine._client.requests.stream import RequestStream
from anyengine._client.session.wakeup import make_bell, make_parker
from anyengine.exceptions import EngineError
from anyengine.outputs import RequestOutput
from anyengine.params import OutputKind

from .client_thread import ClientThread

__all__ = ["Crossing"]


class Crossing:
    """One stream's pump, and the queue behind it. Made when the consumer asks for the first item.

    Invariant: nothing is taken from the stream before the consumer wants it, so that a slow consumer finds it merged.
    The consumer sets ``_wanted`` before it looks whether the pump is idle, and the pump says that it is idle before it
    looks at ``_wanted``: one of them sees the other.
    """

    def __init__(self, thread: ClientThread, stream: RequestStream) -> None:
        self._stream = stream
        self._wanted = False
        self._idle = False
        self.was_cut: bool = False
        """Whether the pump was cancelled: by its consumer, or at the end of the loop."""
        self._bell: Callable[[], None]
        self._items: SimpleQueue[RequestOutput | None] = SimpleQueue()
        self.pump: Future[None] = thread.submit(self._pump, outlives_client=True)
        """Ends with the stream; its exception is the stream's, unless it was cut."""
        items = self._items  # and not self: a future must not keep its consumer's side alive
        self.pump.add_done_callback(lambda _: items.put(None))

    def take(self) -> RequestOutput | None:
        """Wait for the next item; ``None`` when the pump has ended."""
        self._wanted = True
        if self._idle:
            self._bell()
        return self._items.get()

    async def _pump(self) -> None:
        stream = self._stream
        parker = make_parker()
        self._bell = make_bell(parker)
        try:
            completions = await self._start()
            gather = stream.output_kind is OutputKind.FINAL_ONLY
            while True:
                while not completions.ready(gather=gather):
                    await completions.parker.park()
                self._idle = True
                while not self._wanted:
                    await parker.park()
                self._idle = self._wanted = False
                item = await anext(stream)
                self._items.put(item)
                if item.finished:
                    return
        except (StopAsyncIteration, anyio.ClosedResourceError):
            return  # it has ended, or was closed while the prompt was being tokenized
        except anyio.get_cancelled_exc_class():
            self.was_cut = True
            raise

    async def _start(self) -> Completions:
        try:
            return await self._stream.start()
        except EngineError as exc:
            self._stream.give_up(exc)  # a refusal is the end of it, as where it is iterated
            raise
