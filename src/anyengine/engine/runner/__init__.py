"""The torch side: loading, the KV cache, the model runner, the sampler. The only place that imports torch."""
