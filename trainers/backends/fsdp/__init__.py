"""The fsdp train backend: FSDP2 with tensor parallelism over Hugging Face models."""
