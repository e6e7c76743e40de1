"""Loads new weights into a running vLLM engine: names, copy plans, loaders, and what engine and workers say."""
