from pathlib import Path

import pytest

from grpo_dist.plugins.names import absolute, parse_code


@pytest.mark.parametrize(
    ("text", "source", "attribute"),
    [
        ("a/b.py:f", "a/b.py", "f"),
        ("a/b.py", "a/b.py", "other"),
        ("pkg.module:Class", "pkg.module", "Class"),
        ("pkg.module", "pkg.module", "other"),
        ("file:///a/b.py:f", "/a/b.py", "f"),
        ("pkg://pkg.module", "pkg.module", "other"),
        ("~/b.py:f", str(Path.home() / "b.py"), "f"),
        ("b.py:not one", "b.py:not one", "other"),
        (":f", ":f", "other"),
    ],
)
def test_how_code_is_named(text: str, source: str, attribute: str) -> None:
    assert parse_code(text, "other") == (source, attribute)


def test_paths_of_files_become_absolute() -> None:
    assert absolute("b.py:f") == absolute("file://b.py:f") == f"{Path.cwd()}/b.py:f"
    assert absolute("b.py") == f"{Path.cwd()}/b.py"
    assert (absolute("grpo"), absolute("pkg://pkg.module:f")) == ("grpo", "pkg.module:f")
