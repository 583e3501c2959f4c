"""What vLLM's own front end makes of words, schemas, choices and single tokens: one question as JSON on standard input,
one answer on standard output. Run by an interpreter that has vLLM."""

from __future__ import annotations

import json
import sys
from typing import Any

from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.structured_output.backend_guidance import has_guidance_unsupported_json_features
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features
from vllm.v1.structured_output.utils import choice_as_grammar


class _Tokenizer(PreTrainedTokenizerFast):
    max_token_id = 1 << 30


def bad_words(tokenizer: Any, words: list[str]) -> Any:
    params = SamplingParams(bad_words=words)
    params.update_from_tokenizer(tokenizer)
    return params.bad_words_token_ids


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    processor = LogprobsProcessor(tokenizer, [], None, 0.0, 0, None)
    return [
        processor._verify_tokens(convert_ids_list_to_tokens(tokenizer, [token]), [token], ids[max(0, i - 4) : i])[0]
        for i, token in enumerate(ids)
    ]


def main() -> None:
    question = json.load(sys.stdin)
    answer: dict[str, Any] = {"bad_words": [], "texts": []}
    for file, runs in zip(question["tokenizers"], question["ids"], strict=True):
        tokenizer = _Tokenizer(tokenizer_file=file, clean_up_tokenization_spaces=False)
        answer["bad_words"].append(bad_words(tokenizer, question["words"]))
        answer["texts"].append([token_texts(tokenizer, ids) for ids in runs])
    answer["choice"] = choice_as_grammar(question["choices"])
    answer["schemas"] = [
        [has_xgrammar_unsupported_json_features(schema), has_guidance_unsupported_json_features(schema)]
        for schema in question["schemas"]
    ]
    print("\n" + json.dumps(answer))


main()
