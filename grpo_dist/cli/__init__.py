"""The command `grpo-dist NAME`: each module here is one of its commands, over what the rest of the package does."""
