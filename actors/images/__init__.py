"""Pictures of prompts, from the data set to the tensors that engines and trainers get."""
