"""Outputs as JSON, to be stored or sent on, and back.

Owns the form of what JSON does not know: log-probabilities (their columns and texts) and tensors.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from anyengine._wire import Tensor
from anyengine.outputs import FlatLogprobs, RequestOutput

__all__ = ["output_from_json", "output_to_json"]


def output_to_json(output: RequestOutput) -> bytes:
    """``output`` as a JSON object, complete: :func:`output_from_json` makes an equal one of it."""
    return msgspec.json.encode(output, enc_hook=_written)


def output_from_json(text: bytes | str) -> RequestOutput:
    """The output that :func:`output_to_json` wrote; keys that are not known are left out.

    Raises:
        ValueError: it is none.
    """
    return _DECODER.decode(text)


def _written(value: Any) -> Any:
    if isinstance(value, FlatLogprobs):
        _, columns = value.__reduce__()
        return dict(zip(_COLUMNS, columns, strict=True))
    if isinstance(value, Tensor):
        return [value.dtype, value.shape, base64.b64encode(value.data).decode()]
    raise NotImplementedError(f"a {type(value).__qualname__} cannot be written as JSON")


def _read(kind: Any, value: Any) -> Any:
    if kind is FlatLogprobs:
        texts = value.pop("texts")
        return FlatLogprobs(**value, texts=texts)
    dtype, shape, data = value
    return Tensor(dtype, tuple(shape), base64.b64decode(data))


_COLUMNS = ("ends", "token_ids", "logprobs", "ranks", "texts")
_DECODER = msgspec.json.Decoder(RequestOutput, dec_hook=_read)
