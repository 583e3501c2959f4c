"""Small tokenizers of every kind that matters to a detokenizer, built here so that no test needs a download."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from anyengine._text import ModelFacts, Tokenizer
from anyengine._text.detokenizer import _BYTE_OF_CHARACTER

if TYPE_CHECKING:
    from pathlib import Path

CORPUS = [
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog.",
    "Zażółć gęślą jaźń, Москва, 東京都, नमस्ते दुनिया, مرحبا",
    "emoji: 🦙🚀👩‍👩‍👧 and 1 + 2 = 3; don't, isn't it?",
] * 4
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHARACTER_OF_BYTE = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(vocab_size: int = 330, added: tuple[str, ...] = ("日本 go", "é", "<tool>")) -> Backend:
    """As GPT-2, Llama 3, Qwen and SmolLM: the decoder is ByteLevel and nothing else."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(token) for token in added])
    return backend


def byte_level_in_sequence() -> Backend:
    """The same text from a decoder that no table may replace: the general path meets split characters."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


def byte_fallback() -> Backend:
    """As Llama 2 and Mistral: unknown characters as runs of byte tokens, the first space stripped."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<s>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    alphabet = [*"abcdefghijklmnopqrstuvwxyzTFP.,é▁"]
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL + BYTE_TOKENS,
        initial_alphabet=alphabet,
        limit_alphabet=40,
        show_progress=False,
    )
    backend.train_from_iterator([text.replace(" ", "▁") for text in CORPUS], trainer)
    # Byte tokens are trained as special so that they are in the vocabulary; they are ordinary tokens in real files.
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIAL]
    state["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return Backend.from_str(json.dumps(state))


def unigram_metaspace() -> Backend:
    """As T5 and XLM-R: the decoder drops the mark of the first token."""
    vocabulary = [(token, 0.0) for token in [*SPECIAL, "▁", "▁the", "▁Paris", "▁▁", "is", "n't", ".", "▁.", "東", "🦙"]]
    vocabulary += [(letter, -2.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    backend = Backend(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return backend


def word_piece() -> Backend:
    """As BERT, with added tokens: the decoder joins words with spaces and cleans up before punctuation."""
    vocabulary = [*SPECIAL, "the", "capital", "##s", "##ing", "paris", ".", ",", "?", "!", "'", "n't", "'s", "##", "東"]
    backend = Backend(models.WordPiece({token: index for index, token in enumerate(vocabulary)}, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([f"[extra {index}]" for index in range(20)])
    return backend


def word_suffix() -> Backend:
    """As GPT-1 and CLIP: whether a word's space is there shows only with the next token."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, "the</w>", "par", "is</w>", ".</w>", "🦙</w>"])}
    backend = Backend(models.BPE(vocabulary, []))
    backend.decoder = decoders.BPEDecoder()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return backend


def no_decoder() -> Backend:
    """Without a decoder, tokens are joined with spaces."""
    backend = byte_level()
    backend.decoder = None
    return backend


BUILDERS = {
    builder.__name__: builder
    for builder in (
        byte_level,
        byte_level_in_sequence,
        byte_fallback,
        unigram_metaspace,
        word_piece,
        word_suffix,
        no_decoder,
    )
}


@cache
def built(name: str) -> Tokenizer:
    return Tokenizer(BUILDERS[name](), ModelFacts(directory="built"))


def ids_of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte, in whichever way the tokenizer spells bytes."""
    if "ByteFallback" in tokenizer._decoder_types:
        return [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in data]
    return [tokenizer._backend.token_to_id(CHARACTER_OF_BYTE[byte]) for byte in data]


def write_model(directory: Path, backend: Backend | None = None, **files: Any) -> Path:
    """A model directory: ``config={...}`` becomes config.json, and so on; a string becomes a .jinja file."""
    directory.mkdir(exist_ok=True)
    backend = backend or byte_level()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        if isinstance(content, str):
            (directory / f"{name}.jinja").write_text(content, encoding="utf-8")
        else:
            (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory
