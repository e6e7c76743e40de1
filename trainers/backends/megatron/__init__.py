"""The megatron train backend uses megatron-core with tensor, sequence, context, pipeline and expert parallelism."""
