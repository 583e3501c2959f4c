"""What the client fills in, against vLLM's own front end: bad words, choices, backends, the texts of tokens."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import built_tokenizers
import pytest
from schema_examples import ENFORCED, GAPS, PATTERNS

from anyengine import RequestRejected, StructuredOutputsParams
from anyengine._text import ModelFacts, Tokenizer, settle_structured_outputs, tokenize_bad_words
from anyengine._text.structured_outputs import choice_grammar

NAMES = ("byte_level", "byte_fallback", "unigram_metaspace")
WORDS = ["The", "quick", " fox", "ü", "dog", "is", "🦙", "capital of"]
CHOICES = ["a", 'say "b"\\', "line\nfeed\r\t", "\x07\x7fü", "東京"]
SCHEMAS = [schema for schema, _ in GAPS] + [PATTERNS, *ENFORCED]

BACKENDS = {name: built_tokenizers.BUILDERS[name]() for name in NAMES}  # once: training them is not deterministic

rng = random.Random(11)
IDS = {name: [[rng.randrange(BACKENDS[name].get_vocab_size()) for _ in range(12)] for _ in range(60)] for name in NAMES}


@pytest.fixture(scope="module")
def vllms(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("tokenizers")
    files = []
    for name in NAMES:
        files.append(str(directory / f"{name}.json"))
        BACKENDS[name].save(files[-1])
    question = {"tokenizers": files, "words": WORDS, "ids": list(IDS.values()), "choices": CHOICES, "schemas": SCHEMAS}
    child = Path(__file__).with_name("vllm_front_end_child.py")
    done = subprocess.run(
        [vllm_python, str(child)], input=json.dumps(question), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def tokenizer(name: str) -> Tokenizer:
    return Tokenizer(BACKENDS[name], ModelFacts(directory="built"))


@pytest.mark.feature("R26")
@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_bad_words(vllms: dict[str, Any], index: int) -> None:
    assert tokenize_bad_words(tokenizer(NAMES[index]), WORDS) == vllms["bad_words"][index]


@pytest.mark.feature("O12")
@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_texts_of_tokens(vllms: dict[str, Any], index: int) -> None:
    """Random ids, half characters and special tokens among them."""
    texts = tokenizer(NAMES[index]).token_texts
    for ids, theirs in zip(IDS[NAMES[index]], vllms["texts"][index], strict=True):
        assert [texts(token, ids[max(0, i - 4) : i]) for i, token in enumerate(ids)] == theirs


def test_choices(vllms: dict[str, Any]) -> None:
    """The grammars may be spelled in two ways: control characters have two escapes."""
    spelled = {"\\n": "\\u000a", "\\r": "\\u000d", "\\t": "\\u0009"}
    theirs = vllms["choice"]
    for short, long in spelled.items():
        theirs = theirs.replace(short, long)
    assert choice_grammar(CHOICES) == theirs


def test_backends(vllms: dict[str, Any]) -> None:
    for schema, (not_xgrammar, not_guidance) in zip(SCHEMAS, vllms["schemas"], strict=True):
        expected = ("outlines" if not_guidance else "guidance") if not_xgrammar else "xgrammar"
        assert settle_structured_outputs(StructuredOutputsParams(json=schema), "auto", None)[1] == expected, schema
        if not_guidance:
            with pytest.raises(RequestRejected):
                settle_structured_outputs(StructuredOutputsParams(json=schema), "guidance", None)
