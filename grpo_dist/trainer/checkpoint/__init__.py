"""Checkpoints of a run: folder and manifest, saving, resuming, and the config changes that are allowed between."""
