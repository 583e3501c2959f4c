"""Loading, encoding and one-shot decoding, and what is said when something is missing."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from built_tokenizers import built, byte_level, write_model

from anyengine._text import Tokenizer
from anyengine.exceptions import RequestRejected

if TYPE_CHECKING:
    from pathlib import Path


def test_a_model_directory(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        config={"vocab_size": 512, "max_position_embeddings": 64, "eos_token_id": 2},
        generation_config={"eos_token_id": [3, 1]},
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.max_model_len, tokenizer.eos_token_ids) == (512, 64, (3, 1))
    ids = tokenizer.encode("The capital of France")
    assert ids[0] == 0  # <s>, from the file's own post-processor
    assert tokenizer.encode("The capital of France", add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == "The capital of France"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>The capital of France"


def test_without_config_the_tokenizer_itself_says_what_it_can(tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer_config={"eos_token": "<|im_end|>"})
    tokenizer = Tokenizer.from_directory(str(tmp_path))
    assert tokenizer.vocab_size == byte_level().get_vocab_size()
    assert tokenizer.eos_token_ids == (3,)
    assert tokenizer.max_model_len is None


def test_truncation_and_padding_of_training_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    tokenizer = Tokenizer.from_directory(write_model(tmp_path, backend))
    text = "The capital of France is Paris."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1


def test_decode_passes_over_ids_that_are_no_token() -> None:
    tokenizer = built("byte_level")
    ids = tokenizer.encode("Paris")
    assert tokenizer.decode([-1, *ids, 2**40, 10**6]) == "Paris"


@pytest.mark.parametrize("text", ["\ud800", b"bytes", None])
def test_what_is_not_unicode_text_is_refused(text: object) -> None:
    with pytest.raises(RequestRejected) as refused:
        built("byte_level").encode(text)  # type: ignore[arg-type] # the point of the test
    assert (refused.value.parameter, refused.value.value) == ("prompt", text)
    assert "lone surrogates" in (refused.value.remedy or "")


def test_a_missing_tokenizer_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestRejected, match=r"no tokenizer\.json in") as refused:
        Tokenizer.from_directory(tmp_path)
    assert refused.value.value == str(tmp_path)


def test_a_broken_tokenizer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 1}', encoding="utf-8")
    with pytest.raises(RequestRejected, match=r"tokenizer\.json in .* cannot be read"):
        Tokenizer.from_directory(tmp_path)


def test_missing_packages_are_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, chat_template="{{ messages[0].content }} without packages")
    tokenizer = Tokenizer.from_directory(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(RequestRejected, match="tokenizers") as refused:
        Tokenizer.from_directory(tmp_path)
    assert 'pip install "anyengine[text]"' in (refused.value.remedy or "")
    with pytest.raises(RequestRejected, match="jinja2") as refused:
        tokenizer.render_chat([{"role": "user", "content": "Hello"}])
    assert 'pip install "anyengine[text]"' in (refused.value.remedy or "")


@pytest.mark.feature("F20")
def test_importing_loads_no_heavy_package() -> None:
    """Even using a tokenizer loads only what the use needs, and never transformers or torch."""
    program = "import sys, anyengine._text; print({'tokenizers', 'jinja2', 'transformers', 'torch'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=_env())
    assert result.stdout.strip() == "set()"


def _env() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
