"""One unmodified vLLM engine core: a program that an interpreter with vLLM runs by its path.

Owns what a launcher adds to vLLM's own engine process: it reads one line of JSON from standard input, reports stages
and failures as status lines on standard output, and ends when its host does. The engine core runs in this very process,
so that the exit code is the engine's. Imports nothing of anyengine, which need not be installed beside vLLM; the lines
have the shapes of :mod:`anyengine._process.launch` and :mod:`anyengine._process.status`.

Facts of vLLM 0.32.0: ``AsyncEngineArgs`` and ``EngineCoreProc.run_engine_core``.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

_STOP_LIMIT_S = 8.0
"""How long an engine whose host is gone may take to stop by itself; an idle one takes 4 s."""

_MODEL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]
"""What a client reads of a model."""


def main() -> int:
    """Run one engine core to its end; the exit code."""
    launch_fd, status_fd = _divert_standard_streams()
    # This file's directory stands first on the path, and holds nothing that anybody should find there.
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    launch = json.loads(_read_line(launch_fd))
    host = _HostWatch(launch_fd, Path(launch["scratch_dir"]))
    host.start()

    def report(stage: str, **facts: Any) -> None:
        with suppress(BrokenPipeError):  # nobody listens any more; if the host is gone, its watch knows
            os.write(status_fd, json.dumps({"stage": stage, **facts}).encode() + b"\n")

    exit_code: Any = 0
    try:
        _run_engine(launch, report, host)
    except SystemExit as exc:  # how run_engine_core ends when it was asked to
        exit_code = exc.code or 0
    except BaseException as exc:  # noqa: BLE001 - whatever ends an engine is reported
        text = "".join(traceback.format_exception(exc))
        if not host.engine_runs:  # afterwards vLLM has logged it
            sys.stderr.write(text)
        report("failed", error={"type": _qualified_name(exc), "message": str(exc), "traceback": text})
        exit_code = 1
    host.clean_up()
    return exit_code if isinstance(exit_code, int) else 1


def _leave(exit_code: int) -> NoReturn:
    """End the process as multiprocessing ends its own, which vLLM's front end runs engine cores in: an interpreter with
    torch in it takes seconds to be finalised."""
    atexit._run_exitfuncs()
    with suppress(OSError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def _run_engine(launch: dict[str, Any], report: Callable[..., None], host: _HostWatch) -> None:
    report("importing")
    if find_spec("vllm") is None:
        raise ModuleNotFoundError(
            f"{sys.executable} has no vllm: let VLLMEngine(python=...) name an interpreter that can import it"
        )
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor import Executor

    report("configuring")
    args = _engine_args(launch["args"], AsyncEngineArgs)
    # The context decides some defaults, such as batch sizes: they shall be those of `vllm serve`.
    config = args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    _check_ranks(config, launch["rank"])
    report("loading", model_dir=_model_dir(config, Path(launch["scratch_dir"])))
    host.engine_runs = True
    EngineCoreProc.run_engine_core(
        vllm_config=config,
        local_client=True,
        handshake_address=launch["handshake_address"],
        executor_class=Executor.get_class(config),
        log_stats=not args.disable_log_stats,
        dp_rank=launch["rank"],
        local_dp_rank=launch["rank"],
    )


def _check_ranks(config: Any, rank: int) -> None:
    """Refuse what would start and then wait for ever: ranks that compute their experts together, in waves."""
    size = config.parallel_config.data_parallel_size
    if config.model_config.is_moe and (size > 1 or rank > 0):
        raise NotImplementedError(
            f"{config.model_config.model} is a mixture of experts: its data-parallel ranks (data_parallel_size={size}, "
            f"this is rank {rank}) run in waves, which need a coordinator, and this client has none yet. Start one "
            "engine, with tensor_parallel_size and enable_expert_parallel for more devices"
        )


def _engine_args(args: dict[str, Any] | list[str], engine_args: Any) -> Any:
    """vLLM's engine arguments, from names and values or from the strings of a command line."""
    if isinstance(args, dict):
        return engine_args(**_as_vllm_has_them(args, engine_args))
    return engine_args.from_cli_args(_parser(engine_args).parse_args(args))


def _parser(engine_args: Any) -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # No abbreviations: the client, which has to understand some flags, does not know what one may stand for.
    parser = engine_args.add_cli_args(FlexibleArgumentParser(add_help=False, allow_abbrev=False))
    parser.error = _refuse  # instead of leaving the process
    return parser


def _as_vllm_has_them(args: dict[str, Any], engine_args: Any) -> dict[str, Any]:
    """``args``, where a map becomes the config object that vLLM's own command line would make of its JSON.

    An argument that the command line does not know stays as it is, for vLLM to refuse or to take.
    """
    maps = {name: value for name, value in args.items() if isinstance(value, dict)}
    if not maps:
        return args
    parser = _parser(engine_args)
    converted = {}
    for name, value in maps.items():
        found, unknown = parser.parse_known_args([f"--{name.replace('_', '-')}", json.dumps(value)])
        converted[name] = value if unknown else getattr(found, name, value)
    return {**args, **converted}


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _model_dir(config: Any, scratch_dir: Path) -> str | None:
    """A local directory with the model's configuration and tokenizer; ``None`` if there is no such thing."""
    model = config.model_config
    try:
        directory = _local_directory(model.model, model.revision, config)
        if model.tokenizer == model.model or model.tokenizer is None:
            return str(directory)
        tokenizer = _local_directory(model.tokenizer, model.tokenizer_revision, config)
    except Exception:  # noqa: BLE001 - the engine may well run without: token ids in, token ids out
        traceback.print_exc()
        return None
    # One directory that looks as if the tokenizer had come with the model.
    joined = scratch_dir / "model"
    joined.mkdir()
    for name in _MODEL_FILES:
        source = (directory if name in ("config.json", "generation_config.json") else tokenizer) / name
        if source.exists():
            (joined / name).symlink_to(source.absolute())
    return str(joined)


def _local_directory(name: str, revision: str | None, config: Any) -> Path:
    path = Path(name)
    if path.is_dir():
        return path
    if path.is_file():  # weights and all in one file
        return path.parent
    from huggingface_hub import snapshot_download

    cache_dir = config.load_config.download_dir
    return Path(snapshot_download(name, revision=revision, cache_dir=cache_dir, allow_patterns=_MODEL_FILES))


def _qualified_name(exc: BaseException) -> str:
    kind = type(exc)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _divert_standard_streams() -> tuple[int, int]:
    """Take file descriptors 0 and 1 for ourselves, not inherited: ``(launch, status)``. Whatever else prints, and vLLM
    logs to standard output, lands in standard error."""
    launch_fd, status_fd = os.dup(0), os.dup(1)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.close(null_fd)
    os.dup2(2, 1)
    return launch_fd, status_fd


def _read_line(fd: int) -> bytes:
    received = b""
    while not received.endswith(b"\n"):
        chunk = os.read(fd, 65536)
        if not chunk:
            raise SystemExit("standard input ended before the launch line did")
        received += chunk
    return received


class _HostWatch(threading.Thread):
    """Ends this process when its host is gone: when standard input ends, or the parent process does (a fork of the host
    may hold the pipe open).

    No parent-death signal: a second SIGTERM would cut vLLM's teardown short, a SIGKILL would skip it, and either comes
    already when the *thread* ends that started us.
    """

    def __init__(self, launch_fd: int, scratch_dir: Path) -> None:
        super().__init__(name="host-watch", daemon=True)
        self.engine_runs = False
        self._launch_fd = launch_fd
        self._scratch_dir = scratch_dir
        self._host_is_gone = False

    def clean_up(self) -> None:
        """Remove the scratch directory, if nobody else is there to do it."""
        if self._host_is_gone:
            shutil.rmtree(self._scratch_dir, ignore_errors=True)

    def run(self) -> None:
        self._wait_host()
        self._host_is_gone = True
        if self.engine_runs:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_STOP_LIMIT_S)
            _kill_workers()
        self.clean_up()
        os._exit(1)

    def _wait_host(self) -> None:
        poller = select.poll()
        poller.register(self._launch_fd, select.POLLIN)
        with suppress(AttributeError, OSError):  # no such call, or gone already: standard input tells
            poller.register(os.pidfd_open(os.getppid()), select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd != self._launch_fd or not os.read(self._launch_fd, 65536):
                    return


def _kill_workers() -> None:
    """Kill what this process started. Python's resource tracker is spared: it ends last, by itself, and removes the
    shared memory that was left."""
    import psutil  # vLLM needs it, too

    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # gone meanwhile
            if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                process.kill()


if __name__ == "__main__":  # workers are spawned, and import this file
    _leave(main())
