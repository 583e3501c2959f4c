"""Tiny models with random weights, made in a second without a network; and a driver that runs a model runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import tqdm
import transformers

from anyengine._wire import WireSamplingParams
from anyengine.config import EmbeddedEngine
from anyengine.engine.interfaces import ModelRunner, SampledToken, ScheduledSequence, SequenceState
from anyengine.engine.runner.model_runner import create_runner

# Progress bars start a thread, which the leak checks would find.
transformers.utils.logging.disable_progress_bar()
tqdm.tqdm.monitor_interval = 0

VOCAB_SIZE = 300
MAX_POSITIONS = 512

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.4,  # large, so that tokens are well apart and depend on all that went before
}

ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    # The plain one; several sizes of it are in use as SmolLM.
    "llama": ("LlamaConfig", {"num_key_value_heads": 2}),
    # The same, of a size that there are kernels for, whatever it computes.
    "llama_wide": ("LlamaConfig", {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320}),
    # Grouped keys and values, biases, no windows. Heads too small for kernels.
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 2}),
    # Norms of queries and keys, head_dim unlike hidden_size / heads.
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 32}),
    # Some layers without positions.
    "smollm3": ("SmolLM3Config", {"num_key_value_heads": 2, "no_rope_layers": [1, 0, 1]}),
    # Partial rotary embedding, biases, layer norm.
    "phi": ("PhiConfig", {"num_key_value_heads": 2}),
    "phi3": ("Phi3Config", {"num_key_value_heads": 2}),
    # Fused query/key/value, partial rotary embedding, parallel residual.
    "gpt_neox": ("GPTNeoXConfig", {}),
    # One kind of layer, with a window shorter than the prompts.
    "mistral": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": 8, "head_dim": 16}),
    "gemma": ("GemmaConfig", {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {"num_key_value_heads": 1, "sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 16},
    ),
    # Both kinds of layers, eager attention with soft caps, head_dim unlike hidden_size / heads.
    "gemma2": (
        "Gemma2Config",
        {"num_key_value_heads": 1, "sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 16},
    ),
}


def make_tiny_model(architecture: str, model_dir: Path, **overrides: object) -> Path:
    """Save a model of ``architecture`` under ``model_dir``: always the same weights."""
    class_name, own = ARCHITECTURES[architecture]
    config = getattr(transformers, class_name)(**{**_COMMON, **own, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(model_dir)
    return model_dir


def open_runner(model: Path | str, **settings: object) -> ModelRunner:
    """A runner on one thread: the machines that run tests are busy, and waiting threads spin."""
    return create_runner(EmbeddedEngine(model=str(model), num_threads=1, **settings), lambda _status: None)


def make_sequence(request_id: str, prompt: Sequence[int], **sampling: object) -> SequenceState:
    return SequenceState(request_id, list(prompt), WireSamplingParams(**{"temperature": 0.0, **sampling}))


_free_blocks: WeakKeyDictionary[ModelRunner, list[int]] = WeakKeyDictionary()


def give_blocks(runner: ModelRunner, seq: SequenceState, num_tokens: int) -> None:
    """What a scheduler does about the cache, in the simplest way: room for ``num_tokens`` in blocks of its own."""
    free = _free_blocks.setdefault(runner, list(range(runner.num_kv_blocks)))
    while len(seq.block_ids) * runner.kv_block_tokens < num_tokens:
        seq.block_ids.append(free.pop())


def advance(runner: ModelRunner, seqs: Sequence[SequenceState], chunk_tokens: int = 10**6) -> None:
    """One step over all of ``seqs``, as a scheduler does it: at most ``chunk_tokens`` of a prompt at once."""
    scheduled = [ScheduledSequence(seq, min(seq.num_tokens - seq.num_computed_tokens, chunk_tokens)) for seq in seqs]
    for item in scheduled:
        give_blocks(runner, item.seq, item.seq.num_computed_tokens + item.num_new_tokens)
    tokens = runner.step(scheduled)
    for item, token in zip(scheduled, tokens, strict=True):
        item.seq.num_computed_tokens += item.num_new_tokens
        assert (token is None) == (item.seq.num_computed_tokens < item.seq.num_tokens)
        if token is not None:
            assert isinstance(token, SampledToken)
            item.seq.output_token_ids.append(token.token_id)


def leave(runner: ModelRunner, seq: SequenceState) -> None:
    """``seq`` is done: its blocks go to others."""
    runner.finish(seq.request_id)
    _free_blocks[runner] += seq.block_ids
    seq.block_ids.clear()


def is_finished(runner: ModelRunner, seq: SequenceState) -> bool:
    output = seq.output_token_ids
    return len(output) == seq.sampling.max_tokens or bool(output and output[-1] in runner.eos_token_ids)


def generate_staggered(
    runner: ModelRunner,
    seqs: Sequence[SequenceState],
    *,
    batch_size: int,
    steps_between: int = 2,
    chunk_tokens: int = 10**6,
) -> None:
    """Run all of ``seqs``: one joins every ``steps_between`` steps while there is room, and leaves when finished."""
    waiting, running, step = list(seqs), [], 0
    while waiting or running:
        if waiting and len(running) < batch_size and (step % steps_between == 0 or not running):
            runner.start(waiting[0])
            running.append(waiting.pop(0))
        advance(runner, running, chunk_tokens)
        for seq in [seq for seq in running if is_finished(runner, seq)]:
            leave(runner, seq)
            running.remove(seq)
        step += 1
