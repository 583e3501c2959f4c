"""Which file wins, and what is said when one is missing or broken."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from anyengine._text import ModelFacts
from anyengine.exceptions import RequestRejected

if TYPE_CHECKING:
    from pathlib import Path


def facts_of(directory: Path, **files: dict[str, Any]) -> ModelFacts:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return ModelFacts.read(directory)


def test_an_empty_directory_says_nothing(tmp_path: Path) -> None:
    assert ModelFacts.read(tmp_path) == ModelFacts(directory=str(tmp_path))


def test_config_gives_sizes(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, config={"vocab_size": 49152, "max_position_embeddings": 8192})
    assert (facts.vocab_size, facts.max_model_len) == (49152, 8192)


def test_the_language_model_of_a_multimodal_checkpoint_counts(tmp_path: Path) -> None:
    inner = {"vocab_size": 320, "max_position_embeddings": 64, "eos_token_id": 7}
    facts = facts_of(tmp_path, config={"vocab_size": 1, "text_config": inner})
    assert (facts.vocab_size, facts.max_model_len, facts.eos_token_ids) == (320, 64, (7,))


def test_other_names_for_the_longest_sequence(tmp_path: Path) -> None:
    assert facts_of(tmp_path, config={"n_positions": 1024}).max_model_len == 1024


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 1, 3]}, {"eos_token_id": 2}, (3, 1)),
        ({"eos_token_id": 0}, {"eos_token_id": 2}, (0,)),
        ({}, {"eos_token_id": [2, 5]}, (2, 5)),
        ({"eos_token_id": None}, {"eos_token_id": 2}, (2,)),
        ({}, {}, ()),
    ],
)
def test_eos_ids_of_generation_config_come_first(
    tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert facts_of(tmp_path, generation_config=generation, config=config).eos_token_ids == expected


def test_special_tokens_in_every_spelling(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        special_tokens_map={"bos_token": "<old>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None},
        tokenizer_config={"bos_token": "<s>", "additional_special_tokens": ["<a>", {"content": "<b>"}], "add_x": 1},
    )
    assert facts.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "additional_special_tokens": ["<a>", "<b>"],
    }


def test_chat_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert facts_of(tmp_path, tokenizer_config={"chat_template": "one"}).chat_template == "one"
    assert facts_of(tmp_path, tokenizer_config={"chat_template": named}).chat_template == "plain"
    (tmp_path / "chat_template.jinja").write_text("file é", encoding="utf-8")
    assert ModelFacts.read(tmp_path).chat_template == "file é"


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestRejected, match="is not a directory") as refused:
        ModelFacts.read(tmp_path / "missing")
    assert refused.value.parameter == "model"
    assert refused.value.value == str(tmp_path / "missing")
    assert refused.value.remedy is not None


@pytest.mark.parametrize("name", ["config", "generation_config", "tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / f"{name}.json").write_bytes(content)
    with pytest.raises(RequestRejected, match=rf"{name}\.json in .*{tmp_path.name}"):
        ModelFacts.read(tmp_path)
