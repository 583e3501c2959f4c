"""``vllm_offline.py MODEL_DIR DTYPE THREADS``: vLLM's own ``LLM``, in an environment of its own, without ours."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(model_dir: str, dtype: str, num_threads: int) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{num_threads - 1}" if num_threads > 1 else "0")
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    sys.stdout = sys.stderr
    sys.path.insert(0, str(Path(__file__).parent))
    import vllm

    from protocol import answer_lines  # type: ignore[import-not-found]  # beside us, without our package

    llm = vllm.LLM(model_dir, dtype=dtype, max_model_len=2048, max_num_seqs=64, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], output_tokens: int) -> int:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    answer_lines(generate, {"version": vllm.__version__})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
