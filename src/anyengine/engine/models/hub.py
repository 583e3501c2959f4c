"""Gets a model from the Hugging Face Hub, or from what an earlier download left in the Hub's own local cache.

Owns the calls into huggingface_hub and how long an unreachable Hub may take: a few seconds. Fetches data only: no
code, no pickled weights.
"""

from __future__ import annotations

import importlib
import io
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from anyengine._process.status import Status
from anyengine.engine.models.errors import SourceFailure
from anyengine.engine.models.progress import Progress

__all__ = ["fetch_snapshot", "find_snapshot"]

_FILES = [
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template*",
]  # fmt: skip
_IN_SUBFOLDERS = ["*/*"]  # other formats of the same weights: onnx/, original/, …
_CONNECT_TIMEOUT_S = 3.0
_METADATA_TIMEOUT_S = 5.0


def find_snapshot(repo_id: str) -> Path:
    """A complete earlier download. Raises SourceFailure; never touches the network."""
    hub = _hub()
    source = "the Hub's local cache"
    try:
        path = Path(
            hub.snapshot_download(repo_id, allow_patterns=_FILES, ignore_patterns=_IN_SUBFOLDERS, local_files_only=True)
        )
    except (OSError, ValueError):
        raise SourceFailure(source, f"no download of {repo_id} in {hub.constants.HF_HUB_CACHE}") from None
    return _complete(path, source)


def fetch_snapshot(repo_id: str, report: Callable[[Status], None]) -> Path:
    """Download what is missing. Raises SourceFailure, within seconds when the Hub cannot be reached."""
    hub = _hub()
    endpoint = hub.constants.ENDPOINT
    source = f"the Hub ({endpoint}/{repo_id})"
    if hub.is_offline_mode():
        raise SourceFailure(source, "HF_HUB_OFFLINE is set", "unset it to download")
    _check_reachable(endpoint, source)
    progress = Progress(report, "downloading", repo_id)
    try:
        path = hub.snapshot_download(
            repo_id,
            allow_patterns=_FILES,
            ignore_patterns=_IN_SUBFOLDERS,
            etag_timeout=_METADATA_TIMEOUT_S,
            tqdm_class=_bar_class(progress),
        )
    except hub.errors.GatedRepoError as exc:
        raise SourceFailure(source, "access is gated", "accept its terms on the website, then set HF_TOKEN") from exc
    except hub.errors.RepositoryNotFoundError as exc:
        raise SourceFailure(source, "no such model, or a private one", "check the spelling, or set HF_TOKEN") from exc
    except (OSError, ValueError, RuntimeError, hub.errors.HfHubHTTPError) as exc:
        raise SourceFailure(source, f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}") from exc
    progress.finish()
    return _complete(Path(path), source)


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as exc:
        raise SourceFailure("the Hub", f"huggingface_hub is missing ({exc})", 'pip install "anyengine[torch]"') from exc
    return huggingface_hub


def _complete(path: Path, source: str) -> Path:
    """An interrupted or filtered download also leaves a snapshot directory."""
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return path
    raise SourceFailure(source, f"{path} lacks config.json or *.safetensors", "only safetensors weights are read")


def _check_reachable(endpoint: str, source: str) -> None:
    """Fail within seconds without a network.

    Huggingface_hub retries, and a resolver may take half a minute to give up.
    """
    url = urlsplit(endpoint)
    host = url.hostname or ""
    if url.scheme in getproxies() and not proxy_bypass(host):
        return  # the proxy resolves and connects, not we
    port = url.port or (443 if url.scheme == "https" else 80)
    outcome: list[OSError | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), _CONNECT_TIMEOUT_S).close()
            outcome.append(None)
        except OSError as exc:
            outcome.append(exc)

    # A thread, because nothing else bounds name resolution; a daemon, because a stuck one must not keep the process
    # alive.
    thread = threading.Thread(target=connect, name="hub-probe", daemon=True)
    thread.start()
    thread.join(_CONNECT_TIMEOUT_S + 0.5)
    failure = outcome[0] if outcome else TimeoutError(f"no connection within {_CONNECT_TIMEOUT_S:g} s")
    if failure is not None:
        raise SourceFailure(source, f"cannot connect to {host}: {failure}", "check the network or set HTTPS_PROXY")


def _bar_class(progress: Progress) -> type:
    """huggingface_hub reports through tqdm bars: this one draws nothing, and passes on the bar that counts bytes."""
    tqdm: Any = importlib.import_module("tqdm").tqdm

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
        monitor_interval = 0  # no thread of its own

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> Any:
            shown = super().update(n)
            if self._counts_bytes:
                progress.update(int(self.n), int(self.total or 0))
            return shown

    return Bar
