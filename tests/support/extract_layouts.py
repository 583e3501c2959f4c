"""What a release of vLLM changed on the wire: ``python tests/support/extract_layouts.py WHEEL [VERSION]``.

Reads a wheel, an unpacked one, or a directory that contains ``vllm/``, by its syntax trees alone (nothing of vLLM is
imported), and compares fields and utility methods with what this project knows of that release: the version in the
wheel's name, or ``VERSION``. For each difference it prints the row to add. Exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from anyengine._wire.dialect import CANONICAL
from anyengine._wire.layouts import ROWS, Release, last_names
from anyengine._wire.methods import METHODS, Arity, arity_at

WHERE = {
    "EngineCoreRequest": "v1/engine/__init__.py",
    "EngineCoreOutput": "v1/engine/__init__.py",
    "EngineCoreOutputs": "v1/engine/__init__.py",
    "EngineCoreReadyResponse": "v1/engine/__init__.py",
    "ReconfigureDistributedRequest": "v1/engine/__init__.py",
    "SamplingParams": "sampling_params.py",
    "StructuredOutputsParams": "sampling_params.py",
    "PoolingParams": "pooling_params.py",
    "LoRARequest": "lora/request.py",
    "MultiModalFeatureSpec": "multimodal/inputs.py",
    "MultiModalFieldElem": "multimodal/inputs.py",
    "BaseMultiModalField": "multimodal/inputs.py",
    "LogprobsTensors": "v1/outputs.py",
    "SchedulerStats": "v1/metrics/stats.py",
    "PrefixCacheStats": "v1/metrics/stats.py",
    "PrefillStats": "v1/metrics/stats.py",
}
# Structs without rows: any change is news.
FIXED = {
    "EngineCoreEvent": ("v1/engine/__init__.py", "type timestamp"),
    "UtilityOutput": ("v1/engine/__init__.py", "call_id failure_message result"),
    "LogprobsLists": ("v1/outputs.py", "logprob_token_ids logprobs sampled_token_ranks cu_num_generated_tokens"),
    "PlaceholderRange": ("multimodal/inputs.py", "offset length is_embed"),
    "SamplingMaskLists": ("v1/outputs.py", "token_ids offsets cu_num_generated_tokens"),
    "LateInteractionParams": ("pooling_params.py", "mode query_key query_uses"),
    "LateChunkingParams": ("pooling_params.py", "chunk_size"),
    "RequestError": ("outputs.py", "code message retryable"),
    "KvHintsEnvelope": ("v1/kv_hints/protocol.py", "protocol_version message_id actions"),
    "KvHintAction": ("v1/kv_hints/protocol.py", "action_id action_type action_version payload"),
    "RepetitionDetectionParams": ("sampling_params.py", "max_pattern_size min_pattern_size min_count"),
}
CORES = ("EngineCore", "EngineCoreProc", "DPEngineCoreProc")
NOT_CALLED = frozenset((  # public by name, but none of a client's business
    "abort_requests", "add_request", "capture_iteration_details", "has_work", "is_running", "log_error_detail",
    "log_iteration_details", "post_step", "preprocess_add_request", "process_input_sockets", "process_output_sockets",
    "run_busy_loop", "run_engine_core", "shutdown", "startup_handshake", "step", "step_with_batch_queue",
))  # fmt: skip
OF_THE_SENTINEL = "handle_fault_tolerance"  # answered by name in the input thread: not a method
LEFT_OUT = {(0, 31): {"SamplingParams": {"prompt_logprob_token_ids"}}}  # another type there: see layouts.py


class Wheel:
    """The sources of one release, wherever they lie."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._archive = zipfile.ZipFile(path) if path.is_file() else None

    def classes(self, module: str) -> dict[str, ast.ClassDef]:
        """The classes of ``vllm/MODULE``; none if there is no such module."""
        try:
            if self._archive is not None:
                source = self._archive.read(f"vllm/{module}").decode()
            else:
                source = (self._path / "vllm" / module).read_text(encoding="utf-8")
        except (KeyError, FileNotFoundError):
            return {}
        return {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}


def fields(name: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """The fields of a class in wire order: those of its bases in the same module first."""
    node = classes[name]
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from fields(base.id, classes)
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or "ClassVar" in ast.unparse(statement.annotation):
            continue
        if isinstance(statement.target, ast.Name):
            yield statement.target.id


def methods(classes: Mapping[str, ast.ClassDef]) -> dict[str, Arity]:
    """The public methods of the engine core, with the number of arguments besides ``self``."""
    found: dict[str, Arity] = {}
    for node in (statement for core in CORES if core in classes for statement in classes[core].body):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name not in NOT_CALLED:
            found[node.name] = len(node.args.posonlyargs) + len(node.args.args) - 1
    return found


def changes(before: Sequence[str], after: Sequence[str]) -> str:
    """The row that turns ``before`` into ``after``, as the layout table writes it."""
    kept = [name for name in before if name in after]
    while kept != [name for name in after if name in kept]:  # what was moved goes and comes back
        kept.remove(max(kept, key=lambda name: abs(kept.index(name) - [n for n in after if n in kept].index(name))))
    steps = [f"-{name}" for name in before if name not in kept]
    for position, name in enumerate(after):
        if name not in kept:
            steps.append(f"+{name}" if position >= len(kept) else f"+{name}@{position}")
            kept.insert(position, name)
    return " ".join(steps)


def differences(wheel: Wheel, release: Release) -> Iterator[str]:
    """Each difference between ``wheel`` and what the tables say of ``release``, in words."""
    version = ".".join(map(str, release))
    for message, module in WHERE.items():
        classes = wheel.classes(module)
        theirs = tuple(fields(message, classes)) if message in classes else ()
        left_out = LEFT_OUT.get(release[:2], {}).get(message, set())
        theirs = tuple(name for name in theirs if name not in left_out)
        ours = last_names(ROWS[message], release, (*release[:2], release[2] + 1))
        if theirs and theirs != ours:
            yield f'{message}: add the row ("{version}", "{changes(ours, theirs)}")'
        if not theirs and message in CANONICAL and release >= ROWS[message][0][0] and ROWS[message][0][1]:
            yield f"{message}: not found in vllm/{module}"
    for message, (module, known) in FIXED.items():
        classes = wheel.classes(module)
        if message in classes and (theirs := " ".join(fields(message, classes))) != known:
            yield f"{message}: has no rows yet; was {known!r}, is {theirs!r}"
    have = methods(wheel.classes("v1/engine/core.py"))
    for method in sorted(have.keys() | METHODS.keys() - {OF_THE_SENTINEL}):
        ours, theirs_ = arity_at(method, release), have.get(method)
        if ours != theirs_:
            yield f'methods: "{method}" takes {theirs_}, not {ours}: add (({", ".join(map(str, release))}), {theirs_})'


def main(arguments: Sequence[str]) -> int:
    path = Path(arguments[0])
    named = re.search(r"(\d+)\.(\d+)\.(\d+)", arguments[1] if len(arguments) > 1 else path.name)
    if named is None:
        print(f"{path.name} does not name a version: give it as the second argument", file=sys.stderr)
        return 2
    release = (int(named[1]), int(named[2]), int(named[3]))
    found = list(differences(Wheel(path), release))
    print(*(found or [f"vLLM {'.'.join(map(str, release))}: nothing that the tables do not know"]), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
