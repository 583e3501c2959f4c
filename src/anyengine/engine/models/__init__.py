"""Finds the files of a model: a local directory, a GGUF file, a Hub id or an alias; fetches and prepares what is
missing.

Owns where models come from and where they are kept. Imports neither torch nor transformers before it has to convert a
GGUF file or a tokenizer.
"""

from __future__ import annotations

from anyengine.engine.models.errors import ModelNotFoundError, SourceFailure
from anyengine.engine.models.resolve import ResolvedModel, resolve_model

__all__ = ["ModelNotFoundError", "ResolvedModel", "SourceFailure", "resolve_model"]
