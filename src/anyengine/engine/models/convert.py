"""Makes an ordinary model directory out of what is not one: a GGUF file, or a directory whose tokenizer is in an old
format.

Owns the conversions, each done once and kept in the cache under a digest of its input. The client reads a directory
with nothing but the ``tokenizers`` library; and reading a GGUF file takes transformers ten seconds and more each
time, a directory a tenth of one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anyengine._process.status import Status
from anyengine.engine.models.store import cache_dir, file_sha256, publish_dir, workspace

__all__ = ["load_gguf_weights", "prepare_directory", "unpack_gguf"]

Report = Callable[[Status], None]

_FORMAT = 1  # part of every digest: raise it when a conversion changes
# Unpacked to float32, a 4-bit file takes about six times its size: larger ones are dequantised at every start instead.
_UNPACK_LIMIT_BYTES = 512 << 20
# Holds the metadata of a GGUF file and its first tensors; hashing tens of gigabytes at each start would not do.
_HEAD_BYTES = 32 << 20
_TOKENIZER_SOURCES = (
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer_config.json",
)


def unpack_gguf(path: Path, report: Report) -> tuple[Path, Path]:
    """``(model directory, weights)``: both are one directory, unless the file is so large that it stays the weights.

    Raises:
        ImportError: a package of the extra is missing.
        ValueError: transformers cannot read this file.
    """
    unpack_weights = path.stat().st_size <= _UNPACK_LIMIT_BYTES
    digest = _digest(str(path.stat().st_size), file_sha256(path, first_bytes=None if unpack_weights else _HEAD_BYTES))
    target = cache_dir() / "models" / f"{path.stem}-{digest}"
    if not target.is_dir():
        _require("transformers", "torch", "gguf", "accelerate")
        with workspace() as work:
            model_dir = work / "model"
            _convert_gguf(path, model_dir, report, unpack_weights=unpack_weights)
            publish_dir(model_dir, target)
    return target, target if unpack_weights else path


def _convert_gguf(path: Path, model_dir: Path, report: Report, *, unpack_weights: bool) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model_dir.mkdir()
    where: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False, "local_files_only": True}
    report(Status("loading", detail=f"reading {path.name} for the first time", fraction=0.0))
    config = transformers.AutoConfig.from_pretrained(path.parent, **where)
    # It says that the weights are quantised; what is made here is not.
    config.__dict__.pop("quantization_config", None)
    report(Status("loading", detail=f"converting the tokenizer of {path.name}", fraction=0.2))
    transformers.AutoTokenizer.from_pretrained(path.parent, **where).save_pretrained(model_dir)
    _embed_chat_template(model_dir)
    if unpack_weights:
        report(Status("loading", detail=f"unpacking the weights of {path.name}", fraction=0.4))
        load_gguf_weights(path, config, "float32").save_pretrained(model_dir)
    else:
        config.save_pretrained(model_dir)
        with contextlib.suppress(ValueError):  # nothing in the file that a generation configuration could hold
            transformers.GenerationConfig.from_model_config(config).save_pretrained(model_dir)
    report(Status("loading", detail=f"reading {path.name} for the first time", fraction=1.0))


def load_gguf_weights(path: Path, config: Any, dtype: str) -> Any:
    """The model in ``path``, dequantised, through transformers."""
    import transformers

    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    if hasattr(transformers, "GgufConfig"):  # newer ones would rather keep the weights in blocks
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with contextlib.redirect_stderr(io.StringIO()):  # the progress bar of that code cannot be switched off
        return transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, config=config, dtype=dtype, **options
        )


def prepare_directory(model_dir: Path, report: Report) -> Path:
    """A directory with ``tokenizer.json``: ``model_dir`` itself, or a converted one in the cache.

    A model without any tokenizer, or with one that cannot be converted, still serves token ids: then it is
    ``model_dir``.
    """
    sources = [model_dir / name for name in _TOKENIZER_SOURCES if (model_dir / name).is_file()]
    if (model_dir / "tokenizer.json").is_file() or not sources:
        return model_dir
    configs = [model_dir / name for name in ("config.json", "generation_config.json") if (model_dir / name).is_file()]
    target = cache_dir() / "models" / f"{model_dir.name}-{_digest(*(file_sha256(path) for path in sources + configs))}"
    if target.is_dir():
        return target
    report(Status("loading", detail=f"converting the tokenizer of {model_dir.name}"))
    with workspace() as work:
        converted = work / "model"
        converted.mkdir()
        try:
            import transformers

            tokenizer = transformers.AutoTokenizer.from_pretrained(
                model_dir, trust_remote_code=False, local_files_only=True
            )
            tokenizer.save_pretrained(converted)
        except Exception as exc:  # noqa: BLE001  # old tokenizers fail in every way there is; ids still work without one
            report(
                Status("loading", detail=f"the tokenizer of {model_dir} cannot be converted ({exc}); token ids only")
            )
            return model_dir
        if not (converted / "tokenizer.json").is_file():
            return model_dir
        _embed_chat_template(converted)
        for path in configs:
            shutil.copy(path, converted)
        publish_dir(converted, target)
    return target


def _embed_chat_template(model_dir: Path) -> None:
    """Newer transformers write the template to a file of its own.

    Readers of ``tokenizer_config.json`` should find it, too.
    """
    template, settings = model_dir / "chat_template.jinja", model_dir / "tokenizer_config.json"
    if template.is_file():
        content = json.loads(settings.read_text())
        settings.write_text(json.dumps({**content, "chat_template": template.read_text()}, indent=2))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join((str(_FORMAT), *parts)).encode()).hexdigest()[:16]


def _require(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(f'GGUF files need {", ".join(missing)}: pip install "anyengine[torch]"', name=missing[0])
