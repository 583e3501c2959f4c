"""``transformers_generate.py MODEL_DIR DTYPE THREADS [continuous]``: ``generate``, or continuous batching."""

from __future__ import annotations

import sys

from anyengine.bench.contestants.protocol import answer_lines


def main(model_dir: str, dtype: str, num_threads: int, *, continuous: bool) -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(num_threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="sdpa").eval()

    def settings(output_tokens: int) -> transformers.GenerationConfig:
        return transformers.GenerationConfig(
            max_new_tokens=output_tokens,
            min_new_tokens=None if continuous else output_tokens,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )

    def generate(prompts: list[list[int]], output_tokens: int) -> int:
        with torch.inference_mode():
            if continuous:
                outputs = model.generate_batch(
                    prompts,
                    generation_config=settings(output_tokens),
                    continuous_batching_config=transformers.ContinuousBatchingConfig(
                        num_blocks=64 * 2048 // 256, max_batch_tokens=2048
                    ),
                    persistent_manager=True,
                    progress_bar=False,
                )
                return sum(len(output.generated_tokens) for output in outputs.values())
            ids = torch.tensor(prompts)
            found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings(output_tokens))
            return int(found.shape[0] * (found.shape[1] - ids.shape[1]))

    answer_lines(generate, {"version": transformers.__version__})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), continuous="continuous" in sys.argv[4:])
