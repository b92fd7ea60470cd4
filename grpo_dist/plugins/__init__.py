"""Code that the config names: its names, the registries, and functions as files."""
