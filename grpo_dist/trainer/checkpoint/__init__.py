"""A run's checkpoints: the folder and its manifest, the saver, resuming, and which config changes they survive."""
