"""The `vllm` engine runs vLLM's asynchronous engine and replaces its weights version by version."""
