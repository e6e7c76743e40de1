"""The `vllm` engine: vLLM's asynchronous engine, with weights that come in versions."""
