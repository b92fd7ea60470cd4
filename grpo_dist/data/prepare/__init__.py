"""Write data sets as parquet files in verl's schema: `python -m grpo_dist.data.prepare --help`.

One file per data set; files.py reads their sources and writes the results.
"""

from grpo_dist.data.prepare.files import write_parquet

__all__ = ["write_parquet"]
