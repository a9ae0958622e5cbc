"""Files and texts of other people: compressed files, control characters on a terminal, and cells of CSV files."""

import errno
import io
import json
import lzma
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.calibration import Calibration, Identity, load_calibration, save_calibration
from reference.policies.scored import read_scores
from spec import files
from spec.errors import SpecError
from spec.files import parse_toml, read_text
from spec.printing import printable, printable_lines

pytestmark = pytest.mark.law("an-object-proves-itself")


def test_a_compressed_text_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_UNPACKED", 1000)
    path = tmp_path / "text.xz"
    path.write_bytes(lzma.compress(b"a" * 600) + lzma.compress(b"b" * 400))
    assert read_text("PROMPT", path) == "a" * 600 + "b" * 400
    path.write_bytes(path.read_bytes() + lzma.compress(b"c"))
    with pytest.raises(SpecError, match="has more than 1000 bytes of text: unpack the file first"):
        read_text("PROMPT", path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(SpecError, match=r"is not a whole \.xz file"):
        read_text("PROMPT", path)


@pytest.mark.parametrize("key", ["a.", "a . ", '"a".', "'a'\t.", "[a."])
def test_a_key_with_many_dots_is_no_toml(key: str) -> None:
    """Python's parser would need minutes."""
    text = key + key.removeprefix("[") * 30_000 + "a" + ("]" if key[0] == "[" else " = 1")
    with pytest.raises(ValueError, match="a key has more than 32 parts"):
        parse_toml(f"x = 1\n{text}\n")
    assert parse_toml(f"x = '{'a' * 1_000_000}'\n{'a.' * 31}a = 1\n")["x"][:2] == "aa"
    with pytest.raises(ValueError, match="recursion"):
        parse_toml("x = " + "[" * 100_000)


def test_a_byte_order_mark_is_no_key_and_no_text(tmp_path: Path) -> None:
    assert parse_toml("\ufeffx = 1\r\ny = 2") == {"x": 1, "y": 2}
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfA river.\r\n")
    assert read_text("PROMPT", path) == "A river.\r\n"


def test_a_full_disk_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from conformance.verify import certificate

    path = tmp_path / "certificate.toml"
    files.replace_text(path, "old")

    def write_half(path: Path, text: str, **_: object) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_half)
        for write in (files.replace_text, lambda path, text: certificate.write({"a": text}, path)):
            with pytest.raises(OSError, match="No space left"):
                write(path, "a new text")
    assert [(one.name, one.read_text(encoding="utf-8")) for one in tmp_path.iterdir()] == [(path.name, "old")]
    files.replace_text(path, "new")
    assert path.read_text(encoding="utf-8") == "new"


def test_only_the_ends_of_a_large_file_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of 1 TB has the marks of kvspec at an end, in the middle, or not at all."""
    mark, path = b'<meta name="generator" content="kvspec">', tmp_path / "page.html"
    for at, ours in ((0, True), (2**40, True), (2**39, False)):
        with path.open("wb") as file:
            file.truncate(2**40)
            file.seek(at)
            file.write(mark)
        if ours:
            files.check_output("out", path)
        else:
            with pytest.raises(SpecError, match="kvspec did not make the file"):
                files.check_output("out", path)
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(Path, "is_file", lambda _: True)  # replaced by a FIFO after the check
    assert not files._is_ours(path)


def archive(path: Path, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as written:
        for name, data in members.items():
            written.writestr(f"{name}.npy", data)


def array(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


@pytest.mark.parametrize(("load", "first"), [(load_calibration, "header"), (read_scores, "w_k")])
def test_an_archive_of_arrays_is_bounded(
    load: Callable[[Path], object], first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "MOST_UNPACKED", 1000)
    path, zeros = tmp_path / "arrays.npz", np.zeros(100_000, np.int8)
    archive(path, **{first: array(zeros)})
    with pytest.raises(SpecError):  # the arrays are wrong, or the archive has too many bytes
        load(path)
    with pytest.raises(ValueError, match="its parts have 100128 bytes, and the file has"):
        files.check_unpacked(path)
    archive(path, **{first: array(np.random.default_rng(0).bytes(1000))})
    files.check_unpacked(path)


@pytest.mark.parametrize("load", [load_calibration, read_scores])
def test_a_malformed_archive_of_arrays_is_one_sentence(load: Callable[[Path], object], tmp_path: Path) -> None:
    path, huge = tmp_path / "arrays.npz", array(np.zeros(2)).replace(b"(2,), }", b"(2222222222222222,), }")
    archive(path, header=array(np.array("[" * 100_000)), w_k=huge)
    with pytest.raises(SpecError, match="must be "):
        load(path)
    whole = path.read_bytes()
    for damaged in (whole[:-30], whole[:200] + bytes(50) + whole[250:], array(np.zeros(3))):
        path.write_bytes(damaged)
        with pytest.raises(SpecError, match="must be "):
            load(path)


@pytest.mark.parametrize("kind", ["M8[s]", complex, bool, "U3"])
def test_a_linear_score_has_real_numbers(kind: Any, tmp_path: Path) -> None:
    """Check that neither an imaginary part nor a date is lost in silence."""
    path, w = tmp_path / "s.npz", np.zeros((2, 3))
    np.savez(path, w_k=w, w_v=w, b=np.zeros(2, np.int64))
    assert read_scores(path).w_k.shape == (2, 3)
    np.savez(path, w_k=w.astype(kind), w_v=w, b=np.zeros(2))
    with pytest.raises(SpecError, match=r"must be an \.npz file with w_k, w_v, b: they must have real numbers"):
        read_scores(path)


@pytest.mark.parametrize(("change", "words"), [
    ({"layers": [0, 0]}, "wrong layers"), ({"layers": [-1]}, "wrong layers"), ({"layers": "a"}, "wrong layers"),
    ({"factor": [1]}, "wrong factor"), ({"factor": float("inf")}, "wrong factor"), ({"model": ["m"]}, "wrong model"),
    ({"samples": [1]}, "wrong samples"), ({"mean": np.zeros((1, 2))}, "array mean .* 2 dim"),
    ({"mean": np.zeros((1, 1, 4), "M8[s]")}, "array mean has the dtype datetime64"),
    ({"b_2": np.zeros((1, 1))}, "networks or of the gates are missing"),
    ({"bias": np.zeros((1, 1))}, "gates are missing"),
])
def test_a_calibration_with_wrong_contents_is_one_sentence(change: Any, words: str, tmp_path: Path) -> None:
    """Check files whose hash of the frequencies is right."""
    path, identity = tmp_path / "c.npz", Identity("m", np.ones(2))
    save_calibration(Calibration(identity, (0,), np.zeros((1, 1, 4)), np.zeros((1, 1, 2))), path)
    arrays: dict[str, Any] = dict(np.load(path))
    header = json.loads(str(arrays.pop("header")))
    for key, one in change.items():
        (arrays if isinstance(one, np.ndarray) else header)[key] = one
    if isinstance(header["factor"], float):
        header["rope"] = Identity("m", np.ones(2), header["factor"]).rope
    np.savez(path, header=np.array(json.dumps(header)), **arrays)
    with pytest.raises(SpecError, match=f"must be a file that kvspec calibrate wrote: .*{words}"):
        load_calibration(path)


@pytest.mark.parametrize(("text", "line", "lines"), [
    ("a b", "a b", "a b"), ("  a\n\tb ", "a b", "  a\n\tb "), ("\x1b]0;x\x07", "?]0;x?", "?]0;x?"),
    ("a\rb", "a b", "a?b"), ("\x9b31m", "?31m", "?31m"), ("\u202ea\u2066", "?a?", "?a?"), ("\udcff", "?", "?"),
    ("a\u2028b", "a b", "a?b"), ("\u00e9\u00a0\u6587", "\u00e9 \u6587", "\u00e9\u00a0\u6587"),
])
def test_a_printed_text_has_no_control_characters(text: str, line: str, lines: str) -> None:
    assert (printable(text), printable_lines(text)) == (line, lines)
    assert printable(text, 1) == line[:1]


def test_a_spreadsheet_runs_no_cell_of_a_table() -> None:
    pd, tables = pytest.importorskip("pandas"), pytest.importorskip("spec.tables")
    cells = ["=1+1", "+x", "-2+3", "@SUM(1)", "\t=1", "a=b", "-3", "+1.5e3", "", None]
    frame = pd.DataFrame({"answer": cells, "value": np.linspace(-1, 1, 10), "n": pd.array([1, None] * 5, "Int64")})
    text = tables.csv_text(frame)
    expected = ["'=1+1", "'+x", "'-2+3", "'@SUM(1)", "'\t=1", "a=b", "-3", "+1.5e3", "", ""]
    read = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)
    assert read["answer"].tolist() == expected
    assert read.drop(columns="answer").equals(
        pd.read_csv(io.StringIO(frame.to_csv(index=False)), dtype=str, keep_default_na=False).drop(columns="answer")
    )
