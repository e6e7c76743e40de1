"""The fsdp train backend trains Hugging Face models with FSDP2 and tensor parallelism."""
