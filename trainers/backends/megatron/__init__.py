"""The megatron train backend: megatron-core with tensor, sequence, context, pipeline and expert parallelism."""
