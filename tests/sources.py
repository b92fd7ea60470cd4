"""The syntax trees of source files, each parsed once in a process.

Python 3.11's parser fails where a garbage collection runs Python code within it (CPython's gh-106905, `AST constructor
recursion depth mismatch`), so the collector is off meanwhile.
"""

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def parsed(source: str | Path) -> ast.Module:
    """The tree of a text or of a file; shared, so callers leave it as it is."""
    text = source.read_text() if isinstance(source, Path) else source
    on = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if on:
            gc.enable()
