"""Text on this side of the wire: tokenizing, chat templates, incremental detokenizing.

Pure: no clock, no randomness, no network, no tasks. Importing it loads none of ``tokenizers``, ``jinja2``, ``regex``:
each is loaded by the first call that needs it.
"""

from __future__ import annotations

from anyengine._text.bad_words import tokenize_bad_words
from anyengine._text.detokenizer import Detokenizer
from anyengine._text.model_facts import ModelFacts
from anyengine._text.stop_patterns import PatternText, compile_pattern
from anyengine._text.stop_strings import StopText
from anyengine._text.structured_outputs import settle_structured_outputs
from anyengine._text.tokenizer import Tokenizer

__all__ = [
    "Detokenizer",
    "ModelFacts",
    "PatternText",
    "StopText",
    "Tokenizer",
    "compile_pattern",
    "settle_structured_outputs",
    "tokenize_bad_words",
]
