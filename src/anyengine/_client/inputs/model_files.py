"""The files of a model, as far as a client needs them: its facts and its tokenizer.

Owns the reading, and what is no reason to refuse a whole model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import anyio.to_thread

from anyengine._text import ModelFacts, Tokenizer
from anyengine.exceptions import RequestRejected

__all__ = ["ModelFiles", "load_model_files"]

ModelFiles: TypeAlias = tuple[ModelFacts | None, Tokenizer | None, RequestRejected | None]
"""The facts, the tokenizer, and why there is none, where something is known of that."""


async def load_model_files(model_dir: str | None, *, text: bool = True) -> ModelFiles:
    """Read a model's files in a worker thread; ``None``: nobody says where they are.

    A directory without a usable tokenizer is no error: token ids go in and out; text is refused with the reason.
    The same without ``text``, which an engine may have been told to leave to others.

    Raises:
        RequestRejected: ``model_dir`` is no directory, or one of its files is broken.

    Cancellation: returns at once; a disk that hangs keeps only its worker thread.
    """
    files: ModelFiles = (None, None, None)
    if model_dir is not None:
        files = await anyio.to_thread.run_sync(_read_model_dir, model_dir, abandon_on_cancel=True)
    return files if text else (files[0], None, _text_left_out())


def _text_left_out() -> RequestRejected:
    return RequestRejected(
        "the engine was started with skip_tokenizer_init: token ids go in and out, and no text",
        parameter="prompt",
        remedy="give token ids; or leave skip_tokenizer_init out; or describe the engine with a model_dir",
    )


def _read_model_dir(model_dir: str) -> ModelFiles:
    try:
        return _read_model_files(model_dir)
    except RequestRejected:
        raise
    except BaseException as exc:
        # An engine named the directory: what is in it can make parsers fail in ways of their own (a RecursionError; a
        # panic of the Rust code, no Exception). Nothing else is raised in a worker thread, which knows no cancellation.
        raise RequestRejected(  # noqa: ASYNC104
            f"the model's files in {model_dir!r:.500} cannot be read: {type(exc).__name__}: {exc!s:.500}",
            parameter="model",
            value=model_dir,
            remedy="repair the directory, or fetch the model again",
        ) from exc


def _read_model_files(model_dir: str) -> ModelFiles:
    facts = ModelFacts.read(model_dir)
    try:
        return facts, Tokenizer.from_directory(model_dir), None
    except RequestRejected as trouble:
        if (
            (Path(model_dir) / "tokenizer.json").is_file()
            and trouble.__cause__
            and not isinstance(trouble.__cause__, ImportError)
        ):
            raise  # a broken file is the user's to repair; a missing one, or a missing package, may be what they want
        return facts, None, trouble
