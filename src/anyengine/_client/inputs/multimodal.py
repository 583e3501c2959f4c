"""Prompts with images, sounds, ...: what a hook of the user's makes of them before they are sent.

Owns the form of such a prompt, the thread that the hook runs in, and what becomes of its errors. Knows no modality: the
engine's own processor, or one that does the same, is the hook's business.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import anyio
import msgspec

from anyengine._client.worker_threads import WorkerThreads
from anyengine._protocol import cache_key
from anyengine._rules import a_type, reject
from anyengine._wire import MultiModalFeatureSpec
from anyengine.exceptions import EngineError, RequestRejected

from .request_fields import RequestFields, check_features

__all__ = [
    "DataSource",
    "MultiModalPreprocessor",
    "MultiModalPrompt",
    "MultiModalTokens",
    "Preprocessing",
    "as_multimodal",
    "check_hook",
    "continued_by",
    "fields_with_features",
]

_THREADS = 4
_INPUTS: Final = ("multi_modal_data", "mm_processor_kwargs", "media_io_kwargs", "multi_modal_uuids")


class MultiModalPrompt(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A prompt with images, sounds, ..., for the client's ``mm_preprocessor``. The names are those of vLLM's
    dictionaries, which are taken as well: ``{"prompt": ..., "multi_modal_data": {"image": ...}}``.

    ``prompt`` is text or token ids. The client hands the rest to the hook as it is: ``multi_modal_data`` and
    ``multi_modal_uuids`` by modality, ``mm_processor_kwargs``, ``media_io_kwargs``.
    """

    prompt: str | Sequence[int]
    multi_modal_data: Mapping[str, Any] | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    media_io_kwargs: Mapping[str, Any] | None = None
    multi_modal_uuids: Mapping[str, Any] | None = None


class MultiModalPreprocessor(Protocol):
    """What turns a :class:`MultiModalPrompt` into token ids and features: ``EngineClient(mm_preprocessor=...)``.

    A synchronous function. It runs in a worker thread, for four requests at once; one that is cancelled does not wait
    for it, and what it returns then is discarded. Whatever it raises refuses its request alone. What is asynchronous it
    may call with ``anyio.from_thread.run``.
    """

    def __call__(
        self, prompt: MultiModalPrompt, missing_hashes: frozenset[str], /
    ) -> tuple[Sequence[int], Sequence[MultiModalFeatureSpec]]:
        """The token ids of ``prompt`` with all placeholders in them, and its features in the order of their positions.

        A feature may have ``data=None`` if the engine is known to have the item in its cache. If it has not, this is
        called once more, with the hashes (``mm_hash``, or else ``identifier``) that the engine misses: these features
        need their data now, and the token ids must be the same. ``missing_hashes`` is empty the first time.
        """
        ...


class MultiModalTokens(list[int]):
    """Token ids that came with :attr:`features`; :attr:`text` is what they were, if anything."""

    __slots__ = ("features", "source", "text")

    def __init__(
        self,
        token_ids: Iterable[int],
        text: str | None,
        features: Sequence[MultiModalFeatureSpec],
        source: DataSource,
    ) -> None:
        super().__init__(token_ids)
        self.text = text
        self.features = features
        self.source = source


class DataSource:
    """Where the data of one prompt's items comes from, if an engine misses it. Lifetime: one request, with all its
    completions, which ask once."""

    def __init__(self, preprocessing: Preprocessing, prompt: MultiModalPrompt, token_ids: Sequence[int]) -> None:
        self._preprocessing = preprocessing
        self._prompt = prompt
        self._token_ids = token_ids
        self._found: dict[str, MultiModalFeatureSpec] = {}
        self._asking = anyio.Lock()

    async def features(self, missing: frozenset[str]) -> list[MultiModalFeatureSpec]:
        """What the hook has of ``missing``, and maybe others.

        Raises:
            RequestRejected: it failed, or it makes something else of the prompt now.

        Cancellation: returns at once; the hook's result is discarded.
        """
        async with self._asking:
            if not missing <= self._found.keys():
                token_ids, features = await self._preprocessing.run(self._prompt, missing)
                if token_ids != self._token_ids:
                    remedy = "have it make the same of the same prompt"
                    reject("mm_preprocessor", token_ids, "are other token ids than the first time", remedy)
                self._found.update((cache_key(one), one) for one in features if one.data is not None)
            return [*self._found.values()]


class Preprocessing:
    """Runs the hook. Lifetime: one session."""

    def __init__(self, hook: MultiModalPreprocessor) -> None:
        self._hook = hook
        # Of its own: a text is not kept waiting for its tokens by others' images.
        self._threads = WorkerThreads(_THREADS)

    async def tokens(self, prompt: MultiModalPrompt) -> MultiModalTokens:
        """The token ids of ``prompt`` with its features. Neither has been held against the model or the prompt.

        Raises:
            RequestRejected: the hook failed, or returned something else.

        Cancellation: returns at once; the hook's result is discarded.
        """
        token_ids, features = await self.run(prompt, frozenset())
        text = prompt.prompt if isinstance(prompt.prompt, str) else None
        return MultiModalTokens(token_ids, text, features, DataSource(self, prompt, token_ids))

    async def run(
        self, prompt: MultiModalPrompt, missing: frozenset[str]
    ) -> tuple[list[int], list[MultiModalFeatureSpec]]:
        """What the hook makes of ``prompt``: token ids and features.

        Raises, Cancellation: as :meth:`tokens`.
        """
        return await self._threads.run(_ask, self._hook, prompt, missing)


def _ask(
    hook: MultiModalPreprocessor, prompt: MultiModalPrompt, missing: frozenset[str]
) -> tuple[list[int], list[MultiModalFeatureSpec]]:
    try:
        return _taken(hook(prompt, missing))
    except EngineError:
        raise
    except BaseException as exc:
        # Somebody else's code, which may even end its thread (SystemExit): one request's trouble is that request's.
        # It runs in a worker thread, which knows no cancellation.
        raise RequestRejected(  # noqa: ASYNC104
            f"mm_preprocessor failed: {type(exc).__name__}: {exc!s:.500}",
            parameter="multi_modal_data",
            value=prompt.multi_modal_data,
            remedy="look at the cause, which is the hook's own exception",
        ) from exc


def _taken(made: Any) -> tuple[list[int], list[MultiModalFeatureSpec]]:
    if inspect.iscoroutine(made):
        made.close()
    if not isinstance(made, tuple) or len(made) != 2:
        remedy = "return (prompt_token_ids, mm_features), from a synchronous function"
        reject("mm_preprocessor", made, f"returned {a_type(made)}, no pair", remedy)
    token_ids, features = made
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Iterable):
        reject("mm_preprocessor", token_ids, "are no token ids", "return (prompt_token_ids, mm_features)")
    return list(token_ids), check_features("mm_features", features) or []


def check_hook(hook: object) -> None:
    """Raises:
    ValueError: it is no synchronous function, nor ``None``.
    """
    if hook is None:
        return
    if not callable(hook) or any(map(inspect.iscoroutinefunction, (hook, getattr(hook, "__call__", None)))):  # noqa: B004
        raise ValueError(
            f"mm_preprocessor={hook!r} must be a synchronous function of (prompt, missing_hashes), or None; it runs in "
            "a worker thread, where it may call anyio.from_thread.run(...) for what is asynchronous"
        )


def as_multimodal(prompt: Any) -> Any:
    """A prompt with more than text as :class:`MultiModalPrompt`, checked; others as they are. (Of vLLM's dictionaries,
    what says nothing is left out.)

    Raises:
        RequestRejected: one of its parts is of the wrong type, or there is no prompt in it.
    """
    if isinstance(prompt, Mapping):
        inputs = {name: prompt[name] for name in _INPUTS if prompt.get(name) is not None}
        rest = {name: value for name, value in prompt.items() if name not in _INPUTS}
        if not any(_says_something(value) for value in inputs.values()):
            return rest if len(rest) < len(prompt) else prompt
        if others := rest.keys() - {"prompt_token_ids", "prompt", "type"}:
            reject("prompt", sorted(map(str, others)), "are more than a prompt", "give them as arguments")
        token_ids = rest.get("prompt_token_ids")
        given: Any = rest.get("prompt") if token_ids is None else token_ids
        prompt = MultiModalPrompt(prompt=given, **inputs)
    if not isinstance(prompt, MultiModalPrompt):
        return prompt
    given = prompt.prompt
    if isinstance(given, bytes) or not isinstance(given, str | Sequence):
        reject("prompt", given, f"is {a_type(given)}", "give text or token ids beside the multi-modal data")
    for name in _INPUTS:
        value = getattr(prompt, name)
        if value is not None and not isinstance(value, Mapping):
            reject(name, value, f"is {a_type(value)}", "use a mapping, by modality or by name")
    return prompt


def _says_something(value: Any) -> bool:
    return not isinstance(value, Mapping) or bool(value)


def fields_with_features(fields: RequestFields, prompt: object) -> RequestFields:
    """``fields``, with the features that came with ``prompt``.

    Raises:
        RequestRejected: there are some already.
    """
    if not isinstance(prompt, MultiModalTokens):
        return fields
    if fields.get("mm_features") is not None:
        remedy = "give multi-modal data, which mm_preprocessor makes features of, or features and token ids"
        reject("mm_features", fields["mm_features"], "were given beside multi-modal data", remedy)
    return {**fields, "mm_features": prompt.features}


def continued_by(prompt: Sequence[int], token_ids: Sequence[int]) -> list[int]:
    """``prompt`` and ``token_ids`` behind it, with its features if it has some."""
    if isinstance(prompt, MultiModalTokens):
        return MultiModalTokens([*prompt, *token_ids], prompt.text, prompt.features, prompt.source)
    return [*prompt, *token_ids]
