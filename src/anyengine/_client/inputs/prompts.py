"""Prompts that are embeddings: taken over, looked through, put into the form that engines read.

Owns the forms in which embeddings are given. A wrong width, a wrong spelling of the dtype or embeddings that the engine
does not expect end a vLLM engine, or make its answer meaningless. Must not know the rest of a request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NoReturn, TypeAlias

import msgspec

from anyengine._protocol import EngineLimits, check_prompt, check_prompt_length
from anyengine._wire import Tensor
from anyengine.exceptions import EncodeError, RequestRejected

__all__ = ["Embeddings", "EmbedsPrompt", "Prompt", "embeddings_bytes", "is_embeddings", "take_embeddings"]


class EmbedsPrompt(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A prompt of embeddings in place of token ids, for every position or for some of them.

    ``prompt_embeds`` is a numpy array or a torch CPU tensor [num_prompt_tokens, hidden_size] of float32, float16 or
    bfloat16. With ``prompt_token_ids`` and ``prompt_is_token_ids`` (both, one entry for each position), positions that
    are marked take the token's own embedding instead of the row. What it holds is checked when it is used.
    """

    prompt_embeds: Any
    prompt_token_ids: Sequence[int] | None = None
    prompt_is_token_ids: Sequence[bool] | None = None


Prompt: TypeAlias = str | Sequence[int] | EmbedsPrompt | Any
"""Text, token ids, a :class:`ChatPrompt`, vLLM's ``{"prompt": ...}`` and ``{"prompt_token_ids": ...}``; these with
images, sounds, ... (:class:`MultiModalPrompt`); or embeddings: an :class:`EmbedsPrompt`, or what stands in one (a numpy
array, a torch tensor)."""

_DTYPES: Final = ("float32", "float16", "bfloat16")


class Embeddings(msgspec.Struct, frozen=True):
    """A prompt of embeddings, with memory of its own. Invariant: two dimensions, a dtype of three, all finite."""

    tensor: Tensor  # [num_prompt_tokens, hidden_size]
    token_ids: Sequence[int] | None = None
    is_token_ids: Sequence[bool] | None = None

    def check(self, limits: EngineLimits, *, generates: bool) -> tuple[list[int] | None, list[bool] | None]:
        """The token ids and their marks, for a mixed prompt.

        Raises:
            RequestRejected: the engine does not take embeddings, or not these.
        """
        if not limits.prompt_embeds:
            # It would answer something meaningless.
            _refuse(self.tensor.shape, "the engine takes no embeddings", limits.enabled_by("enable_prompt_embeds=True"))
        if limits.hidden_size is None:
            _refuse(self.tensor.shape, "the model's hidden size is unknown", "describe the engine with a model_dir")
        check_prompt_length(self.tensor.shape[0], limits, generates=generates)
        if (self.token_ids is None) != (self.is_token_ids is None):
            _refuse(self.is_token_ids, "ids or marks alone say nothing", "give both")
        if self.token_ids is None or self.is_token_ids is None:
            return None, None
        ids = check_prompt(self.token_ids, limits, generates=generates)
        return ids, list(self.is_token_ids)


def is_embeddings(prompt: Prompt) -> bool:
    """Whether ``prompt`` is meant as embeddings."""
    return isinstance(prompt, EmbedsPrompt | Tensor) or (
        hasattr(prompt, "dtype") and len(getattr(prompt, "shape", ())) > 1
    )


def embeddings_bytes(prompt: Prompt) -> int:
    """How much memory a copy of ``prompt`` takes, if it is embeddings; 0 if not."""
    size_bytes: int = getattr(getattr(prompt, "prompt_embeds", prompt), "nbytes", 0)
    return size_bytes


def take_embeddings(prompt: Prompt) -> Embeddings:
    """A private copy of ``prompt``, looked through. Blocks in proportion to its size.

    Raises:
        RequestRejected: it is not a matrix of finite floats.
    """
    given = prompt if isinstance(prompt, EmbedsPrompt) else EmbedsPrompt(prompt_embeds=prompt)
    array = given.prompt_embeds
    try:
        tensor = (array if isinstance(array, Tensor) else Tensor.from_array(array)).torch_spelled()
    except (EncodeError, TypeError, ValueError, AttributeError) as exc:
        _refuse(type(array).__name__, f"it cannot be read: {exc}", "give a numpy array or a torch CPU tensor")
    if tensor.dtype not in _DTYPES or len(tensor.shape) != 2:
        found = f"dtype {tensor.dtype} and shape {list(tensor.shape)}"
        _refuse(found, f"it has {found}", f"use [num_prompt_tokens, hidden_size] of {', '.join(_DTYPES)}")
    tensor = Tensor(tensor.dtype, tensor.shape, bytes(tensor.data))
    if tensor.nbytes and not _all_finite(tensor):
        _refuse(tensor.shape, "it has a NaN or an infinity in it", "repair what computes it")
    return Embeddings(tensor, given.prompt_token_ids, given.prompt_is_token_ids)


def _all_finite(tensor: Tensor) -> bool:
    try:
        array = tensor.numpy()
    except ImportError:
        return all(map(math.isfinite, tensor.values()))
    return math.isfinite(array.max()) and math.isfinite(array.min())  # NaN wins in both


def _refuse(value: Any, problem: str, remedy: str) -> NoReturn:
    raise RequestRejected(
        f"prompt of embeddings ({value!r:.200}): {problem}; {remedy}",
        parameter="prompt_embeds",
        value=value,
        remedy=remedy,
    )
