"""Tables become rows line by line, whatever quotes and line ends are in them."""

import csv
import gzip
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.store.object_store import ObjectStore
from pipeline.records import Quarantined
from pipeline.steps.ingestion.manifest_rows import (
    KnownFields,
    Row,
    Split,
    csv_rows,
    split_by_commas,
    split_by_tabs,
)

NAMES = ("path", "text", "speaker")
DIALECTS: Sequence[tuple[str, Split]] = ((",", split_by_commas), ("\t", split_by_tabs))
CELLS = st.text(
    st.sampled_from("ab \"\t,;'") | st.characters(exclude_categories=["Cs"]), max_size=6
)
LINES = CELLS.map(lambda cell: cell.replace("\r", "").replace("\n", ""))


def read(folder: Path, data: bytes, split: Split, name: str = "t") -> list[Row | Quarantined]:
    store, uri = ObjectStore((str(folder),)), str(folder / name)
    store.put(uri, data)
    return list(csv_rows(store, uri, split, KnownFields(NAMES, ("age",))))


def fields_of(rows: Sequence[Row | Quarantined]) -> list[dict[str, str]]:
    return [dict(row.fields) for row in rows if isinstance(row, Row)]


def details_of(rows: Sequence[Row | Quarantined]) -> list[str]:
    return [row.detail for row in rows if isinstance(row, Quarantined)]


@pytest.mark.parametrize(("delimiter", "split"), DIALECTS)
@given(
    table=st.lists(st.tuples(LINES, LINES, LINES), max_size=5),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    is_packed=st.booleans(),
)
def test_each_row_of_a_writer_of_csv_comes_back(
    delimiter: str,
    split: Split,
    table: list[tuple[str, ...]],
    end: str,
    quoting: int,
    is_packed: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """With delimiters and quotes in its fields, any line ends, a byte-order mark, and gzip."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter, lineterminator=end, quoting=quoting)  # type: ignore[arg-type]
    writer.writerows([NAMES, *table])
    data = file.getvalue().encode("utf-8-sig")
    name, data = ("t.gz", gzip.compress(data, mtime=0)) if is_packed else ("t", data)
    found = read(tmp_path_factory.getbasetemp(), data, split, name)
    pairs = (zip(NAMES, row, strict=True) for row in table)
    assert fields_of(found) == [{name: cell for name, cell in row if cell} for row in pairs]
    assert len(found) == len(table)


@pytest.mark.parametrize(("delimiter", "split"), DIALECTS)
@given(data=st.data())
def test_a_stray_quote_costs_no_other_row(
    delimiter: str, split: Split, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Wherever quotes are put, lines are rows and ledger rows, and none holds another's words."""
    lines = [delimiter.join([f"p{n}", f"words of {n}", f"s{n}"]) for n in range(5)]
    text = "\n".join(lines)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text)))
        text = f'{text[:place]}"{text[place:]}'
    header = delimiter.join(NAMES)
    found = read(tmp_path_factory.getbasetemp(), f"{header}\n{text}\n".encode(), split)
    assert len(found) == 5
    for number, row in enumerate(found):
        if isinstance(row, Quarantined):
            assert row.detail.startswith(f"line {number + 2}: ")
            assert row.num_bytes >= len(lines[number])
        else:
            letters = {cell.replace('"', "") for cell in row.fields.values()}
            assert letters == {f"p{number}", f"words of {number}", f"s{number}"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ('"YES"', "YES"),
        ('"SAY ""NO"""', 'SAY "NO"'),
        ('"A\tB"', "A\tB"),
        ('"NO," HE SAID', '"NO," HE SAID'),
        ('HE SAID "NO', 'HE SAID "NO'),
        ('""NO""', '""NO""'),
    ],
)
def test_quotes_in_tsv_are_letters_unless_they_enclose_a_field(
    tmp_path: Path, field: str, value: str
) -> None:
    """Common Voice and others write what is said, and spreadsheets quote as in CSV."""
    [row] = read(tmp_path, f"path\ttext\tspeaker\na\t{field}\tann\n".encode(), split_by_tabs)
    assert isinstance(row, Row)
    assert row.fields == {"path": "a", "text": value, "speaker": "ann"}


@pytest.mark.parametrize(
    ("name", "lines", "said"),
    [
        (",", 'a,"ONE,ann\nb,TWO,bob', ["line 2: a quote that is not closed"]),
        (",", 'a,"ONE\nTWO",ann', ["line 2: a quote that", "line 3: 2 fields, and the"]),
        (",", 'a,"ONE" X,ann', ["line 2: ',' expected after '\"'"]),
        ("\t", 'a\t"ONE\tann', ["line 2: a quote that is not closed"]),
        ("\t", "a\tONE\tann\textra\n\nb", ["line 2: 4 fields", "line 4: 1 fields"]),
    ],
)
def test_each_line_that_is_no_row_is_in_the_ledger(
    tmp_path: Path, name: str, lines: str, said: list[str]
) -> None:
    """By its number in the table, with what is wrong; empty lines are counted, and are no rows."""
    data = f"{name.join(NAMES)}\n{lines}".encode()
    details = details_of(read(tmp_path, data, dict(DIALECTS)[name]))
    assert len(details) == len(said)
    assert all(detail.startswith(each) for detail, each in zip(details, said, strict=True))


def test_lines_end_as_any_system_ends_them(tmp_path: Path) -> None:
    """Also all three in one table, which joined tables have."""
    data = b"path,text,speaker\r\na,ONE,x\rb,TWO,y\n\r\nc,THREE,z"
    found = fields_of(read(tmp_path, data, split_by_commas))
    assert [row["text"] for row in found] == ["ONE", "TWO", "THREE"]


def test_a_line_beyond_a_mebibyte_is_one_ledger_row(tmp_path: Path) -> None:
    """It is not kept whole, and the next line is read."""
    long = "x" * (3 * 2**20)
    found = read(tmp_path, f"path,text,speaker\na,{long},x\nb,TWO,y\n".encode(), split_by_commas)
    assert details_of(found)[0].startswith("line 2: beyond 1048576 characters")
    assert [row["path"] for row in fields_of(found)] == ["b"]


def test_row_numbers_of_pandas_are_a_column_without_name(tmp_path: Path) -> None:
    """Elsewhere a column without a name may be empty, as spreadsheets leave them."""
    found = read(tmp_path, b",path,text,\n0,a,ONE,\n1,b,TWO,lost\n", split_by_commas)
    assert fields_of(found) == [{"path": "a", "text": "ONE"}]
    assert details_of(found) == ["line 3: a field in a column without a name: name the column"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"path,path,text\n", "t:1: column 'path' twice: rename one"),
        (b"\n\npath,texts\n", "t: 'texts' (is it text?): not known, so not used: rename"),
        (b"path;text\n", "t: 'path;text' (is it text?): not known"),
        (b'path,"text\n', "t:1: the columns' names: a quote that is not closed"),
        ("path,text\n".encode("utf-16"), "t:1: the columns' names are not UTF-8: convert"),
    ],
)
def test_columns_that_cannot_be_used_are_refused_at_once(
    tmp_path: Path, data: bytes, said: str
) -> None:
    """By the table and its line, with the remedy."""
    with pytest.raises(ValueError, match="t") as refusal:
        read(tmp_path, data, split_by_commas)
    assert said in str(refusal.value)


def test_an_ignored_column_is_passed_over_also_if_it_is_used(tmp_path: Path) -> None:
    """So a table with a column that is not known can be read as it is."""
    store, uri = ObjectStore((str(tmp_path),)), str(tmp_path / "t.csv")
    store.put(uri, b"path,text,mood\na,ONE,glad\n")
    known = KnownFields(NAMES, (), ("mood", "text"))
    assert fields_of(list(csv_rows(store, uri, split_by_commas, known))) == [{"path": "a"}]
