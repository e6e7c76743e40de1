"""Adapters (LoRA): their description and tensors in PEFT's format, and the digest of the base that they belong to."""
