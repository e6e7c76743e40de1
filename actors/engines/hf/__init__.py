"""The `hf` engine runs Hugging Face causal LMs in the calling process and batches concurrent requests."""
