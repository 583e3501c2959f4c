"""Structured outputs: which tokens a JSON schema, a regular expression, a choice or a grammar lets come next.

Owns the grammars (compiled by llguidance in a thread of their own, and kept) and one matcher for each constrained
sequence, whose state is the tokens that it has seen: batches, preemption and recomputation do not concern it. The
meaning of the parameters is that of vLLM's backend ``guidance`` (``v1/structured_output/backend_guidance.py``, 0.32).
Must not know the model, the cache or the sampler.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from anyengine._wire import WireStructuredOutputs
from anyengine.engine.interfaces import SequenceState

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Constraints"]

_NUM_KEPT = 64  # compiled grammars: as many as users have schemas in turn, not as many as requests
_MOST_REASON = 500  # characters of an error: llguidance appends its whole state


class Constraints:
    """The constraints of all sequences of one runner. Its thread lives from the first one to :meth:`close`.

    Only the thread touches what is kept there (tokenizer, grammars); a matcher belongs to its sequence.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._thread: ThreadPoolExecutor | None = None
        self._tokenizer: LLTokenizer | None = None
        self._grammars: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._matchers: dict[str, Future[LLMatcher]] = {}

    def start(self, seq: SequenceState) -> Future[None]:
        """Compile the constraint of ``seq``. The Future fails with a ValueError that says what is wrong with it.

        Raises:
            ValueError: no constraint can be enforced here.
        """
        params = seq.sampling.structured_outputs
        assert params is not None
        self._check_possible()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="anyengine-grammars")
        matcher = self._matchers[seq.request_id] = self._thread.submit(self._in_thread_matcher, params)
        ready: Future[None] = Future()
        matcher.add_done_callback(lambda done: _settle(ready, done))
        return ready

    def finish(self, request_id: str) -> None:
        """Forget its matcher. Unknown ids are ignored."""
        matcher = self._matchers.pop(request_id, None)
        if matcher is not None:
            matcher.cancel()

    def masked(self, logits: Tensor, seqs: Sequence[SequenceState]) -> Tensor:
        """``logits`` [num_seqs, vocab] without the tokens that may not come next: a copy, if any is constrained."""
        if not self._matchers:
            return logits
        rows = [row for row, seq in enumerate(seqs) if seq.request_id in self._matchers]
        if not rows:
            return logits
        allowed = [self._matchers[seqs[row].request_id].result().compute_bitmask() for row in rows]
        bits = np.unpackbits(
            np.frombuffer(b"".join(allowed), np.uint8).reshape(len(rows), -1),
            axis=1,
            count=self._vocab_size,
            bitorder="little",
        )  # [num_rows, vocab]
        forbidden = torch.from_numpy(bits == 0).to(logits.device)
        if len(rows) == len(seqs):
            return logits.masked_fill(forbidden, float("-inf"))
        masked = logits.clone()
        masked[rows] = masked[rows].masked_fill_(forbidden, float("-inf"))
        return masked

    def accept(self, seq: SequenceState, token_id: int) -> str | None:
        """``token_id`` was sampled for ``seq``; why it cannot be, in words: nothing that was allowed was possible."""
        future = self._matchers.get(seq.request_id)
        if future is None:
            return None
        matcher = future.result()
        if matcher.is_error():
            reason = matcher.get_error()[:_MOST_REASON]
            return f"structured_outputs: the grammar cannot be followed any further: {reason}"
        allowed = seq.sampling.allowed_token_ids
        if not allowed or token_id in allowed:
            # Behind the end there may be more of the same, for a request that ignores it.
            taken = token_id in self._eos_token_ids if matcher.is_stopped() else matcher.consume_token(token_id)
            if taken:
                return None
        return (
            f"structured_outputs: after {len(seq.output_token_ids)} tokens the grammar leaves no token that the other "
            "sampling parameters (min_tokens, allowed_token_ids, bad_words, logit_bias) and logits processors allow"
        )

    def close(self) -> None:
        """End the thread."""
        self._matchers.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _check_possible(self) -> None:
        try:
            import llguidance  # noqa: F401
        except ImportError as exc:
            raise ValueError(
                f'structured_outputs needs llguidance: pip install "anyengine[structured]" ({exc})'
            ) from exc
        if not self._tokenizer_file.is_file():
            raise ValueError("structured_outputs needs the tokenizer.json of the model, which its directory lacks")
        if not self._eos_token_ids:
            raise ValueError("structured_outputs needs a model with an end-of-sequence token, and this one names none")

    # ------------------------------------------------------------------ in the thread

    def _in_thread_matcher(self, params: WireStructuredOutputs) -> LLMatcher:
        from llguidance import LLMatcher

        key = msgspec.json.encode(params)
        grammar = self._grammars.pop(key, None)
        if grammar is None:
            try:
                grammar = LLMatcher(self._in_thread_tokenizer(), _grammar_text(params), log_level=0)
            except ValueError as exc:
                raise ValueError(f"structured_outputs: {exc}") from exc
            if grammar.is_error():
                raise ValueError(f"structured_outputs: {grammar.get_error()[:_MOST_REASON]}")
        self._grammars[key] = grammar
        if len(self._grammars) > _NUM_KEPT:
            self._grammars.popitem(last=False)
        return grammar.deep_copy()

    def _in_thread_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer
            from tokenizers import Tokenizer

            backend = Tokenizer.from_file(str(self._tokenizer_file))
            backend.no_padding()
            backend.no_truncation()
            # A model may have fewer rows than its tokenizer has tokens; what is more is never sampled.
            num_tokens = max(self._vocab_size, backend.get_vocab_size(with_added_tokens=True))
            self._tokenizer = LLTokenizer(backend.to_str(), n_vocab=num_tokens, eos_token=self._eos_token_ids)
        return self._tokenizer


def _settle(ready: Future[None], matcher: Future[Any]) -> None:
    if matcher.cancelled() or not ready.set_running_or_notify_cancel():
        return
    error = matcher.exception()
    if error is None:
        ready.set_result(None)
    else:
        ready.set_exception(error)


def _grammar_text(params: WireStructuredOutputs) -> str:
    """What llguidance compiles.

    Raises:
        ValueError: it is no grammar, or of a kind that is not served.
    """
    from llguidance import LLMatcher, grammar_from

    if params.json is not None:
        return _schema_grammar(params.json, params)
    if params.json_object:
        return _schema_grammar({"type": "object"}, params)
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return grammar_from("choice", json.dumps(params.choice))
    if params.grammar is not None:
        return grammar_from("grammar", params.grammar)
    if params.structural_tag is not None:
        return _tag_grammar(params.structural_tag, params)
    raise ValueError("it names no constraint")


def _schema_grammar(schema: str | dict[str, Any], params: WireStructuredOutputs) -> str:
    from llguidance import LLMatcher

    if params.disable_additional_properties:
        schema = _closed(json.loads(schema) if isinstance(schema, str) else schema)
    return LLMatcher.grammar_from_json_schema(schema, defaults=_options(params))


def _options(params: WireStructuredOutputs) -> Any:
    """What llguidance calls them in a schema's ``x-guidance``."""
    options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return options


def _closed(schema: Any) -> Any:
    """``schema`` with objects that have the properties that it names and no others, where it does not say itself."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        name: value if name in ("const", "default", "enum", "examples") else _closed(value)
        for name, value in schema.items()
    }
    names = any(isinstance(schema.get(kind), dict) for kind in ("properties", "patternProperties"))
    if names and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


class _Structure(msgspec.Struct):
    begin: str
    schema: dict[str, Any]
    end: str


class _Tag(msgspec.Struct):
    """Free text, in which each of ``triggers`` begins one of ``structures``."""

    structures: list[_Structure]
    triggers: list[str]


def _tag_grammar(text: str, params: WireStructuredOutputs) -> str:
    from llguidance import StructTag

    try:
        tag = msgspec.json.decode(text, type=_Tag)
    except msgspec.DecodeError as exc:
        raise ValueError(f"structural_tag is served as structures and triggers: {exc}") from exc
    if not tag.structures:
        raise ValueError("structural_tag has no structures")
    tags = []
    for structure in tag.structures:
        trigger = next((trigger for trigger in tag.triggers if trigger and structure.begin.startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"{structure.begin!r} begins with none of {tag.triggers!r}")
        schema = _closed(structure.schema) if params.disable_additional_properties else structure.schema
        schema = {"x-guidance": _options(params), **schema}
        tags.append(StructTag(trigger=trigger, begin=structure.begin, grammar=schema, end=structure.end))
    return StructTag.to_grammar(tags)
