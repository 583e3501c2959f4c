"""``anyengine engine``: our engine core behind somebody else's front end.

Owns the options and the process of one engine that no program started: no launch line, no parent to watch. It runs in
this very process, without an event loop, until a signal, the end of its front ends or a failure ends it.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from anyengine import EmbeddedEngine
from anyengine.cli.rendering import StartupProgress
from anyengine.config import DEFAULT_MODEL, DType
from anyengine.exceptions import EngineStartupError

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from anyengine import Status

__all__ = ["EngineOptions", "add_engine_options", "check_place", "serve_front_end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of ``anyengine engine``. ``None``: not given, so the library's default holds."""

    model: str
    handshake: str
    rank: int
    headless: bool
    stay: bool
    reconnect_grace: float
    dtype: DType
    device: str
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    kv_cache_memory_bytes: int | None
    enable_prefix_caching: bool
    enforce_eager: bool
    max_loras: int
    profile_dir: str | None
    logits_processors: list[str]
    num_threads: int | None
    seed: int
    runner: str | None
    quiet: bool
    traceback: bool

    def engine(self) -> EmbeddedEngine:
        """Raises:
        ValueError: a value is out of range.
        """
        names = ("max_num_seqs", "max_num_batched_tokens", "runner")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return EmbeddedEngine(
            model=self.model,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            enable_prefix_caching=self.enable_prefix_caching,
            enforce_eager=self.enforce_eager,
            max_loras=self.max_loras,
            profile_dir=self.profile_dir,
            logits_processors=self.logits_processors,
            num_threads=self.num_threads,
            seed=self.seed,
            **given,
        )

    def check(self) -> None:
        """Raises:
        ValueError: an address that no front end can have, a rank or a time out of range, a runner or a logits
            processor that there is not.
        """
        check_place(self.handshake, self.rank)
        if self.runner is not None:  # before a front end is waited for
            from anyengine.engine.start import runner_factory

            runner_factory(self.runner)
        if self.logits_processors:
            from anyengine.engine.runner.logits_processors import find_logits_processors

            find_logits_processors(self.logits_processors)
        if not self.reconnect_grace >= 0:
            raise ValueError(f"reconnect_grace={self.reconnect_grace} must be a number of seconds, 0 or more")


def check_place(handshake: str, rank: int) -> None:
    """Raises:
    ValueError: an address that no front end can have, or a rank out of range.
    """
    scheme, separator, rest = handshake.partition("://")
    host, _, port = rest.rpartition(":")
    good = (scheme == "tcp" and bool(host) and port.isdecimal() and 0 < int(port) < 65536) or (
        scheme == "ipc" and bool(rest)
    )
    if not separator or not good:
        raise ValueError(
            f"handshake={handshake!r} must be tcp://HOST:PORT or ipc://PATH: the front end's "
            "--data-parallel-address and --data-parallel-rpc-port"
        )
    if not 0 <= rank < 65536:
        raise ValueError(f"rank={rank} must be from 0 to 65535")


def add_engine_options(parser: ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help="an alias, a local directory, a GGUF file or a Hub id (default: %(default)s)",
    )
    group = parser.add_argument_group("front end")
    group.add_argument(
        "--handshake",
        required=True,
        metavar="ADDRESS",
        help="where the front end waits for its engines: tcp://HOST:PORT (for vLLM's: --data-parallel-address and "
        "--data-parallel-rpc-port)",
    )
    group.add_argument("--rank", type=int, default=0, metavar="N", help="data-parallel rank (default: %(default)s)")
    group.add_argument(
        "--no-headless",
        dest="headless",
        action="store_false",
        help="for a front end that balances outside (hybrid or external load balancing), which insists on it",
    )
    group.add_argument(
        "--stay", action="store_true", help="keep the model when the front end has gone, and wait for the next one"
    )
    group.add_argument(
        "--reconnect-grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long a front end may be unreachable before it counts as gone (default: %(default)g)",
    )
    _add_model_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument("-q", "--quiet", action="store_true", help="nothing but errors on standard error")
    group.add_argument("--traceback", action="store_true", help="show where an error was raised")


def _add_model_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--dtype",
        choices=get_args(DType),
        default="auto",
        help="of weights and activations (default: auto, which is float32 on a CPU, the checkpoint's own on CUDA)",
    )
    group.add_argument("--device", default="auto", help="torch's name of it (default: auto)")
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="prompt and answer together (default: the model's, at most 8192)",
    )
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="requests that run at once")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="TOKENS", help="computed in one step")
    group.add_argument(
        "--kv-cache-memory-bytes", type=int, metavar="N", help="of keys and values (default: by the free memory)"
    )
    group.add_argument(
        "--no-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="compute the beginning that requests have in common for each of them",
    )
    group.add_argument(
        "--enforce-eager", action="store_true", help="compute with torch alone, compile no kernels for the processor"
    )
    group.add_argument(
        "--max-loras", type=int, default=0, metavar="N", help="LoRA adapters kept loaded (default: 0, none is served)"
    )
    group.add_argument("--profile-dir", metavar="DIRECTORY", help="where the profiler writes (default: no profiler)")
    group.add_argument(
        "--logits-processors",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="code that changes the logits of requests which ask for it: entry points of the group "
        "anyengine.logits_processors, or MODULE:ATTRIBUTE",
    )
    group.add_argument("--num-threads", type=int, metavar="N", help="of torch (default: its own choice)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of requests without one (default: 0)")
    group.add_argument("--runner", metavar="MODULE:FACTORY", help="another model runner than ours")


def serve_front_end(options: EngineOptions, engine: EmbeddedEngine) -> None:
    """Serve front ends until the last one has gone, or until SIGTERM or SIGINT; a second signal ends it at once.

    Raises:
        EngineStartupError: there is no such model.
        Exception: whatever the start-up or the engine raised.
    """
    # Below the argument checks, which are quick: these import the engine.
    from anyengine.engine.models.errors import ModelNotFoundError
    from anyengine.engine.models.resolve import resolve_model
    from anyengine.engine.serving.lifeline import Lifeline
    from anyengine.engine.serving.server import Attachment
    from anyengine.engine.start import run_attached_engine

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    attachment = Attachment(
        handshake_address=options.handshake,
        rank=options.rank,
        local=False,
        headless=options.headless,
        reconnect_grace_s=options.reconnect_grace,
        stay=options.stay,
    )
    progress = StartupProgress(sys.stderr)

    def report(status: Status) -> None:
        if options.quiet:
            return
        if status.stage == "handshake":
            print(f"anyengine: waiting for the front end at {options.handshake}", file=sys.stderr, flush=True)
            return
        progress.report(status)
        if status.stage == "ready":
            print("anyengine: serving", file=sys.stderr, flush=True)

    lifeline = Lifeline(None)
    lifeline.watch()
    try:
        if options.runner is None:
            try:  # before a front end is waited for
                resolve_model(engine.model, report)
            except ModelNotFoundError as exc:
                raise EngineStartupError(str(exc), stage="resolving") from exc
        run_attached_engine(attachment, engine, report=report, on_stop=lifeline.on_stop)
    finally:
        progress.close()
        lifeline.close()
