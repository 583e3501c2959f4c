"""Logits processors that a user brings along: what one is, and how it is found by its name.

Owns the interface and the look-up. Code is loaded from the names that were configured where the engine was started,
never from a request. Must not know the sampler, nor who asks for what.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar, runtime_checkable

from anyengine.engine.interfaces import SequenceState

if TYPE_CHECKING:
    import torch

__all__ = [
    "LogitsProcessor",
    "LogitsProcessorFactory",
    "ServedModel",
    "find_logits_processors",
    "make_logits_processors",
]

State = TypeVar("State")

_GROUP: Final = "anyengine.logits_processors"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a logits processor is told of the model: ``model_dir`` has its tokenizer, if it has any."""

    model_dir: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: torch.device


@runtime_checkable
class LogitsProcessor(Protocol[State]):
    """Changes the logits of requests that ask for it, in the engine's thread: whatever it takes, all requests wait for.

    ``State`` is whatever it has to know of one request. It must not change what a sequence says of itself.
    """

    def start(self, seq: SequenceState) -> State | None:
        """Called once for each request that generates, before it waits for its turn. ``None``: it is not concerned.

        ``seq.sampling.extra_args`` has what the request says beside vLLM's own parameters. The state may keep ``seq``,
        or ``seq.output_token_ids``, which grows by a token with each step.

        Raises:
            ValueError: the request asks for what cannot be done; it fails with this reason, and alone.
        """

    def apply(self, logits: torch.Tensor, states: Sequence[State]) -> torch.Tensor:
        """Called once for each step in which requests that it concerns get a token: ``logits`` [num_requests, vocab],
        float32, has a row for each of ``states``. Returns it, changed in place, or another one of this shape. The
        largest logit of each row must be finite.

        A row must depend on nothing but its logits and its state: then a request gets the same tokens in any company.
        When it raises, it is called again for each row alone, and the requests of those that fail again fail.
        """


LogitsProcessorFactory: TypeAlias = Callable[[ServedModel], LogitsProcessor[Any]]
"""What a name stands for: a class, or a function."""


def find_logits_processors(names: Sequence[str]) -> dict[str, LogitsProcessorFactory]:
    """What makes the processors ``names``, in their order. Each is the name of an entry point of the group
    ``anyengine.logits_processors``, or ``"module:attribute"``.

    Raises:
        ValueError: one of them cannot be found or imported, and why.
    """
    return {name: _found(name) for name in names}


def make_logits_processors(
    factories: Mapping[str, LogitsProcessorFactory], model: ServedModel
) -> dict[str, LogitsProcessor[Any]]:
    """The processors for ``model``, in order.

    Raises:
        ValueError: a factory has raised, or made something else.
    """
    made: dict[str, LogitsProcessor[Any]] = {}
    for name, factory in factories.items():
        try:
            made[name] = factory(model)
        except Exception as exc:  # the factory is somebody else's
            raise ValueError(f"logits_processors: {name!r} cannot be made: {type(exc).__name__}: {exc}") from exc
        if not isinstance(made[name], LogitsProcessor):
            raise ValueError(
                f"logits_processors: {name!r} has made a {type(made[name]).__name__}, which is no logits processor: "
                "it must have the methods start and apply"
            )
    return made


def _found(name: str) -> LogitsProcessorFactory:
    try:
        factory: LogitsProcessorFactory = _attribute(name) if ":" in name else _entry_point(name).load()
    except Exception as exc:  # its module is somebody else's
        raise _cannot_use(name, f"cannot be loaded: {type(exc).__name__}: {exc}") from exc
    if not callable(factory):
        raise _cannot_use(name, f"is of type {type(factory).__name__}, and cannot be called to make one")
    return factory


def _attribute(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))


def _entry_point(name: str) -> EntryPoint:
    found = entry_points(group=_GROUP, name=name)
    if len({one.value for one in found}) > 1:
        owners = ", ".join(sorted(f"{one.value} of {one.dist.name if one.dist else '?'}" for one in found))
        raise LookupError(f"several distributions have an entry point of this name: {owners}")
    for one in found:
        return one
    raise LookupError("there is no such entry point")


def _cannot_use(name: str, why: str) -> ValueError:
    known = ", ".join(map(repr, sorted(entry_points(group=_GROUP).names))) or "there is none"
    return ValueError(
        f"logits_processors: {name!r} {why}. It must be 'module:attribute', or an entry point of the group {_GROUP} "
        f"({known})"
    )
