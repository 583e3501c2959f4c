"""What the JSON files beside a model's weights say, as far as prompts and outputs need it.

Owns the reading and the precedence of those files. Knows nothing of tokenizing or of templates: it hands on their text.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyengine.exceptions import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ModelFacts", "sampling_defaults"]

_MAX_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
"""The names that architectures give to the longest sequence they were made for, most usual first."""


_SAMPLING_NAMES = {
    **{name: name for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature")},
    **{name: name for name in ("top_k", "top_p", "min_p")},
    "max_new_tokens": "max_tokens",
}
_HIDDEN_SIZE_KEYS = ("hidden_size", "n_embd", "d_model")
_MULTIMODAL_KEY = "vision|visual|image|video|audio|speech|multimodal|thinker"
"""``"vision_config"``, ``"image_token_id"``, ...: what no model of text alone has in its configuration."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of one model directory; ``None`` or empty where no file says anything.

    ``vocab_size`` is in rows of the embedding, ``hidden_size`` in columns, ``max_model_len`` in tokens.
    ``special_tokens`` maps names such as ``"bos_token"`` to their text (``"additional_special_tokens"`` to a list of
    texts). ``embedding_sizes`` are those that a Matryoshka embedding may be cut to: empty if it may not, ``None`` if
    to any. ``multimodal`` says whether the model takes more than text. ``sampling`` has the sampling parameters that
    the model is made for, by our names.
    """

    directory: str
    vocab_size: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    max_model_len: int | None = None
    chat_template: str | None = None
    hidden_size: int | None = None
    embedding_sizes: tuple[int, ...] | None = ()
    multimodal: bool = False
    special_tokens: Mapping[str, str | list[str]] = field(default_factory=dict)
    sampling: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ModelFacts:
        """Read ``config.json``, ``generation_config.json``, ``tokenizer_config.json``, ``special_tokens_map.json`` and
        ``chat_template.jinja``, each if it is there. Blocks on the disk.

        Raises:
            RequestRejected: ``path`` is no directory, or one of the files is not what its name says.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise RequestRejected(
                f"{os.fspath(path)!r} is not a directory",
                parameter="model",
                value=os.fspath(path),
                remedy="give the directory that holds config.json and tokenizer.json",
            )
        config = _read_json(directory / "config.json")
        multimodal = any(re.search(_MULTIMODAL_KEY, key) for key in config)
        # A multimodal checkpoint keeps the facts of its language model one level down.
        text_config = config.get("text_config")
        if isinstance(text_config, dict):
            config = {**config, **text_config}
        generation_config = _read_json(directory / "generation_config.json")
        tokenizer_config = _read_json(directory / "tokenizer_config.json")
        special_tokens_map = _read_json(directory / "special_tokens_map.json")
        return cls(
            directory=str(directory),
            vocab_size=_positive_int(config.get("vocab_size")),
            eos_token_ids=_token_ids(generation_config.get("eos_token_id")) or _token_ids(config.get("eos_token_id")),
            max_model_len=next((n for key in _MAX_LENGTH_KEYS if (n := _positive_int(config.get(key)))), None),
            chat_template=_chat_template(directory, tokenizer_config),
            hidden_size=next((n for key in _HIDDEN_SIZE_KEYS if (n := _positive_int(config.get(key)))), None),
            embedding_sizes=_embedding_sizes(config),
            multimodal=multimodal,
            special_tokens=_special_tokens({**special_tokens_map, **tokenizer_config}),
            sampling=sampling_defaults(generation_config),
        )


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """What a generation configuration says of sampling, by our names (vLLM: ``get_diff_sampling_param``)."""
    return {
        ours: value
        for theirs, ours in _SAMPLING_NAMES.items()
        if isinstance(value := generation_config.get(theirs), int | float) and not isinstance(value, bool)
    }


def _read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty when there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _broken_file(path, error) from error
    if not isinstance(value, dict):
        raise _broken_file(path, "not a JSON object")
    return value


def _broken_file(path: Path, why: object) -> RequestRejected:
    return RequestRejected(
        f"{path.name} in {str(path.parent)!r} cannot be read: {why}",
        parameter="model",
        value=str(path.parent),
        remedy=f"repair {path.name} or fetch the model again",
    )


def _positive_int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _token_ids(value: object) -> tuple[int, ...]:
    """``eos_token_id`` as files have it, an id or a list of ids, without repetition and in order."""
    values = value if isinstance(value, list) else [value]
    return tuple(
        dict.fromkeys(v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 32)
    )


def _embedding_sizes(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    sizes = config.get("matryoshka_dimensions")
    if isinstance(sizes, list) and sizes:
        return tuple(size for size in sizes if isinstance(size, int))
    return None if config.get("is_matryoshka") is True else ()


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise _broken_file(path, error) from error
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # named templates, such as "default" and "tool_use"
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str | list[str]]:
    found: dict[str, str | list[str]] = {}
    for name, value in config.items():
        if name == "additional_special_tokens" and isinstance(value, list):
            found[name] = [text for item in value if (text := _token_text(item)) is not None]
        elif name.endswith("_token") and (text := _token_text(value)) is not None:
            found[name] = text
    return found


def _token_text(value: object) -> str | None:
    """A token as files have it: its text, or an object with the text under ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
