"""Pictures in vLLM: it gets the tensors that the trainer gets, and preprocesses nothing."""
