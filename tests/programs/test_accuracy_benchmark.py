"""The accuracy table's command: record, tables and errors."""

import json

import pytest

from benchmarks.msign_accuracy import main

SMALL = ["--methods", "SVD", "--shapes", "4x3", "--dtypes", "float32", "--conditions", "1", "100"]


def test_accuracy_command_writes_record_and_table(tmp_path, capsys):
    out = tmp_path / "results" / "accuracy.json"
    main([*SMALL, "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["condition"], row["scale"]) for row in rows] == [
        (1, 1),
        (100, 1),
        (100, 1e-30),
        (100, 1e30),
    ]
    assert all(row["orthogonality"] <= 10 and row["forward"] <= 1e-4 for row in rows)
    table = out.with_suffix(".md").read_text()
    assert "| SVD | 4 x 3 |" in table
    assert table in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*SMALL, "--out", str(out)])
    assert "pass --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shapes", "3y4"], "no shape such as"),
        (["--shapes", "0x4"], "no shape such as"),
        (["--conditions", "0.5"], "at least 1"),
        (["--conditions", "many"], "at least 1"),
        (["--methods", "magic"], "invalid choice"),
        (["--nonsense"], "unrecognized"),
    ],
    ids=str,
)
def test_invalid_arguments_give_one_line_error(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
