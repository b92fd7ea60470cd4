"""The run of commands that train one model on rows with known answers."""
