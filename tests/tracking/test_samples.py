from grpo_dist.tracking.base import as_html, as_markdown, format_samples

SAMPLE = {"step": 0, "uid": "val-7", "input": "1+1=?", "output": "#### 2", "gts": "2", "score": 1.0}


def test_on_the_terminal():
    other = SAMPLE | {"uid": "val-8", "output": "one\ntwo", "score": 0.25}
    assert format_samples([SAMPLE, other]) == (
        "validation, step 0, val-7: score 1, gts 2\n  input:\n    1+1=?\n  output:\n    #### 2\n"
        "validation, step 0, val-8: score 0.25, gts 2\n  input:\n    1+1=?\n  output:\n    one\n    two"
    )


def test_a_response_that_could_not_be_scored():
    assert "val-7: score none, gts 2" in format_samples([SAMPLE | {"score": None, "failure": "it raised"}])


def test_escape_sequences_do_not_reach_the_terminal():
    assert "\x1b" not in format_samples([SAMPLE | {"output": "\x1b[2J", "gts": "\x1b[0m"}])
    assert "é\t両" in format_samples([SAMPLE | {"output": "é\t両"}])


def test_markdown_of_the_text_stays_text():
    assert as_markdown(SAMPLE) == "val-7: score 1, gts `2`\n\ninput\n\n    1+1=?\n\noutput\n\n    #### 2\n"


def test_as_a_table():
    """A model cannot write markup into it, and a row without a field has an empty cell."""
    table = as_html([SAMPLE | {"output": "<script>", "gts": [1]}, {"step": 0, "uid": "val-8", "acc": 0.5}])
    header, first, second = (part.partition("</tr>")[0] for part in table.split("<tr>")[1:])
    cells = [part.replace("</th>", "</td>").replace("<th>", "<td>") for part in (header, first, second)]
    assert [part[4:-5].split("</td><td>") for part in cells] == [
        ["step", "uid", "input", "output", "gts", "score", "acc"],
        ["0", "val-7", "1+1=?", "&lt;script&gt;", "[1]", "1.0", ""],
        ["0", "val-8", "", "", "", "", "0.5"],
    ]
