"""The `hf` engine: Hugging Face causal LMs in the process that asks, batched over concurrent requests."""
