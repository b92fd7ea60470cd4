"""The tasks that come with the package, one module each: the rows that a policy trains on, and the scorer of answers.

The layers below find them by name: a row's `data_source` chooses its scorer in rewards/load.py, and
`builtin:TASK/SPLIT` its rows in data/files.py. `grpo-dist data` writes rows as parquet files.
"""
