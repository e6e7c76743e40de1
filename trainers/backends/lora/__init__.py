"""LoRA in training: its settings, its layers, and the weights that go to engines, checkpoints and folders."""
