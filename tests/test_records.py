"""Records: allowed values of a row, and files that survive bad input, full disks and kills."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from asserting import every
from literal_records import from_json, to_json

from kerneltune import records
from kerneltune.files import locked
from kerneltune.records import Record
from kerneltune.spec import Case, TaskKey

PASSED: dict[str, Any] = {
    "op": "rmsnorm_fwd",
    "variant": "optimized",
    "case": "te-8192x4096",
    "dtype": "bfloat16",
    "quant": "fp8",
    "policy": "cold",
    "status": "passed",
    "time_us": 43.5,
    "gbps": 2300.0,
    "ceiling_gbps": 4000.0,
    "pct_ceiling": 57.5,
    "ci_low_us": 43.0,
    "ci_high_us": 44.0,
    "n": 40,
    "aa_floor": 0.004,
    "config": {"block": 1024, "warps": 4},
    "device": "NVIDIA H200",
    "driver": "570.1",
    "torch": "2.9",
    "triton": "3.5",
    "source_hash": "0123456789ab",
    "commit": "abcdef0",
    "date": "2026-11-21T06:00:00+00:00",
    "axes": {"M": 8192, "N": 4096},
    "options": {"zero_centered": False},
}
NO_TIMES = dict.fromkeys(["time_us", "gbps", "ceiling_gbps", "pct_ceiling", "ci_low_us", "ci_high_us", "n", "aa_floor"])


def record(**changes: Any) -> Record:
    return Record(**{**PASSED, **changes})


def untimed(status: str, **changes: Any) -> Record:
    return record(status=status, **{**NO_TIMES, **changes})


def test_record_key_and_label_have_all_fields_of_the_case() -> None:
    case = Case("", (("M", 8192), ("N", 4096)), "bfloat16", "fp8", (("zero_centered", False),))
    assert record().key == TaskKey("rmsnorm_fwd", record().variant, case, "cold")
    assert record().key.of_case == record(variant="another").key.of_case != record(policy="hot").key.of_case
    assert record(case="another name").key == record().key
    assert record().label == "rmsnorm_fwd M=8192 N=4096 zero_centered=False bfloat16 fp8 cold"
    assert record().config_label == "block=1024 warps=4"
    assert record(config=None).config_label == "-"


def test_record_begins_with_the_fields_of_the_contract() -> None:
    first = list(Record.__struct_fields__)[:23]
    assert " ".join(first) == (
        "op variant case dtype quant policy status time_us gbps ceiling_gbps pct_ceiling ci_low_us ci_high_us n aa_floor "
        "config device driver torch triton source_hash commit date"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": ""}, "op: '': expected a name"),
        ({"op": "a\x1b[2J"}, r"op: 'a\x1b[2J': expected a name without control characters"),
        ({"case": "a\u202eb"}, r"case: 'a\u202eb': expected a name without control characters"),
        ({"axes": {"M\n": 1}}, r"axes: {'M\n': 1}: expected names without control characters"),
        ({"date": "yesterday"}, "date: 'yesterday': expected an ISO 8601 date and time in UTC"),
        ({"date": "2026-11-21T06:00:00"}, "date: '2026-11-21T06:00:00': expected an ISO 8601 date and time in UTC"),
        ({"time_us": float("nan")}, "time_us: nan: expected a number from 0 to 1e+15, or null"),
        ({"aa_floor": -0.1}, "aa_floor: -0.1: expected a number from 0 to 1e+15, or null"),
        ({"device": "interpreter"}, "status: 'passed': expected 'checked' on device 'interpreter', where times mean nothing"),
        ({"time_us": None}, "time_us: None: expected a value above 0 where the status is 'passed'"),
        ({"time_us": 0.0}, "time_us: 0.0: expected a value above 0 where the status is 'passed'"),
        ({"ci_low_us": 1e-300}, "ci_low_us: 1e-300: expected at least 1e-06 µs"),
        ({"ci_low_us": 45.0}, "ci_low_us: 45.0: expected at most ci_high_us = 44.0"),
        ({"time_us": 44.1}, "time_us: 44.1: expected a time within its interval, 43.0 to 44.0"),
        ({"time_us": 42.9}, "time_us: 42.9: expected a time within its interval, 43.0 to 44.0"),
        ({"status": "failed", "reason": "y differs"}, "time_us: 43.5: expected none where the status is 'failed'"),
        ({"reason": "odd"}, "reason: 'odd': expected none where the status is 'passed'"),
        ({"samples_us": [[1.0, 2.0], [3.0]]}, "n: 40: expected the number of samples_us, 3"),
        ({"samples_us": [[1.0, 2.0]], "n": 2}, "time_us: 43.5: expected a time within samples_us, 1.0 to 2.0"),
    ],
)
def test_record_with_an_inconsistent_value_raises_with_field_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        record(**changes)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": 16}, "dtype: 16: expected str"),
        ({"driver": None}, "driver: None: expected str"),
        ({"axes": {"M": True}}, "axes: {'M': True}: expected int"),
        ({"axes": {"M": -1}}, "axes: {'M': -1}: expected int >= 0"),
        ({"axes": {"M": 10**30}}, f"axes: {{'M': {10**30}}}: expected int <= 9223372036854775807"),
        ({"options": {"pad": [8]}}, "options: {'pad': [8]}: expected bool | int | float | str"),
        ({"config": [1]}, "config: [1]: expected object | null"),
        ({"config": {"block": [1]}}, "config: {'block': [1]}: expected bool | int | float | str | null"),
        ({"time_us": "43"}, "time_us: '43': expected float | null"),
        ({"gbps": True}, "gbps: True: expected float | null"),
        ({"time_us": 1e16}, "time_us: 1e+16: expected float <= 1000000000000000.0"),
        ({"n": 0}, "n: 0: expected int >= 1"),
        ({"status": "ok"}, "status: 'ok': invalid enum value 'ok'"),
        ({"role": "judge"}, "role: 'judge': invalid enum value 'judge'"),
        ({"samples_us": [1.0]}, "samples_us[0]: 1.0: expected array"),
        ({"samples_us": []}, "samples_us: []: expected array of length >= 1"),
        ({"samples_us": [[1.0], []]}, "samples_us[1]: []: expected array of length >= 1"),
        ({"samples_us": [[1.0, "2"]], "n": 2}, "samples_us[0][1]: '2': expected float"),
        ({"samples_us": [[1.0, 0.0]], "n": 2}, "samples_us[0][1]: 0.0: expected float >= 1e-06"),
        ({"reason": "x" * 999, "op": 3}, "op: 3: expected str"),
        ({"colour": "y" * 999}, f"colour: '{'y' * 118}…: expected no field of this name"),
    ],
)
def test_from_json_of_a_wrong_value_raises_with_field_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        from_json(line(**changes))
    assert str(error.value) == message


def test_timing_of_samples_has_bandwidth_and_its_share_of_the_ceiling() -> None:
    fields = records.timing([[10.0] * 20, [10.0] * 20], traffic_bytes=3e7, ceiling_gbps=4000.0, floor=0.01)
    assert (fields["time_us"], fields["ci_low_us"], fields["ci_high_us"], fields["p10_us"]) == (10.0,) * 4
    assert (fields["gbps"], fields["pct_ceiling"], fields["n"]) == (3000.0, 75.0, 40)
    assert records.timing([[10.0] * 20], 3e7, None, None)["pct_ceiling"] is None


@pytest.mark.parametrize("status", ["failed", "skipped"])
def test_record_that_did_not_pass_needs_a_reason_and_has_no_time(status: str) -> None:
    assert untimed(status, reason="y differs").time_us is None
    with pytest.raises(ValueError, match=f"^reason: '': expected a reason where the status is '{status}'$"):
        untimed(status)
    with pytest.raises(ValueError, match=f"^p90_us: 1.0: expected none where the status is '{status}'$"):
        untimed(status, reason="y differs", p90_us=1.0)


def test_load_after_append_returns_the_same_records(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folders" / "rmsnorm.jsonl"
    first, second, third = record(), untimed("checked", device="interpreter", config=None), record(variant="baseline")
    records.append(path, [first])
    records.append(path, [second, third])
    records.append(path, [])
    assert records.load(path) == [first, second, third]
    lines = path.read_text().splitlines()
    assert list(json.loads(lines[0])) == list(Record.__struct_fields__)
    assert every(from_json(to_json(r)) == r for r in (first, second))


def test_newest_keeps_the_last_of_each_variant_key_and_device() -> None:
    old, other, new = record(time_us=43.1), record(variant="baseline"), record(case="renamed")
    assert records.newest([old, other, new]) == [new, other]


def test_merge_of_an_older_row_keeps_the_newer_row(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    new, left_over = record(date="2026-02-01T00:00:00+00:00"), record(date="2026-01-01T00:00:00+00:00", time_us=43.1)
    records.merge(path, [new])
    records.merge(path, [left_over])  # of an interrupted run, after newer rows have come from elsewhere
    assert records.load(path) == [new]


@pytest.mark.parametrize(
    ("status", "reason", "replaces"),
    [
        ("skipped", "cannot be imported: ModuleNotFoundError: No module named 'cutlass'", False),
        ("skipped", "no fp8", True),
        ("failed", "y differs", True),
    ],
)
def test_merge_of_a_row_without_a_time_replaces_a_time_unless_an_import_failed(
    tmp_path: Path, status: str, reason: str, replaces: bool
) -> None:
    path = tmp_path / "r.jsonl"
    timed = record(role="peer")
    later = untimed(status, role="peer", reason=reason, date="2026-11-22T06:00:00+00:00")
    records.merge(path, [later])
    assert records.load(path) == [later]
    path.unlink()
    records.merge(path, [timed])
    records.merge(path, [later])
    assert records.load(path) == [later if replaces else timed]
    assert records.newest([timed, later]) == [later if replaces else timed]  # as a table of several files shows it


def test_merge_of_a_time_replaces_a_failed_import(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    timed = record(role="peer", date="2026-11-22T06:00:00+00:00")
    records.merge(path, [untimed("skipped", role="peer", reason="cannot be imported: ImportError: no B in a")])
    records.merge(path, [timed])
    assert records.load(path) == [timed]


@pytest.mark.parametrize("before", ["checked", "failed"])
def test_merge_checks_of_a_failed_import_replaces_a_failed_import_alone(tmp_path: Path, before: str) -> None:
    path = tmp_path / "r.check.jsonl"
    checked = untimed(before, role="peer", reason="" if before == "checked" else "y differs")
    old, new = (untimed("skipped", role="peer", reason=f"cannot be imported: {name}") for name in ("numpy", "cutlass"))
    for rows, kept in (([old], old), ([new], new), ([checked], checked), ([new], checked)):
        records.merge_checks(path, rows, lambda _record: True)
        assert records.load(path) == [kept]


def test_record_key_does_not_depend_on_the_order_of_keys() -> None:
    values = json.loads(to_json(record(options={"zeros": 1, "alpha": "x"})))
    turned = from_json(json.dumps({**values, "axes": {"N": 4096, "M": 8192}, "options": {"alpha": "x", "zeros": 1}}))
    assert turned.key == from_json(json.dumps(values, sort_keys=True)).key == record(options=values["options"]).key


def test_frame_of_files_has_the_documented_columns_and_dtypes(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    records.append(path, [record(role="peer", flops=7), untimed("failed", reason="y differs", config=None, options={})])
    frame = records.frame([path])
    assert {name: str(frame[name].dtype) for name in ("op", "time_us", "n", "flops", "date", "axes.M", "config.block")} == {
        "op": "string", "time_us": "float64", "n": "Int64", "flops": "Int64", "date": "datetime64[us, UTC]", "axes.M": "Int64",
        "config.block": "object",
    }  # fmt: skip
    assert frame["time_us"].tolist()[0] == 43.5
    assert frame["time_us"].isna().tolist() == [False, True]
    assert frame["role"].tolist() == ["peer", ""]
    assert frame["flops"].isna().tolist() == [False, True]
    assert frame["options.zero_centered"].isna().tolist() == [False, True]
    assert set(frame["file"]) == {str(path)}
    assert frame.groupby("op")["time_us"].min().to_dict() == {"rmsnorm_fwd": 43.5}


def test_frame_of_an_empty_file_has_all_columns(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("")
    table = records.frame(tmp_path / "r.jsonl")
    assert {"op", "time_us", "file"} <= set(table.columns)
    assert str(table["date"].dtype) == "datetime64[us, UTC]"


def test_records_import_without_pandas() -> None:
    code = "import sys, kerneltune.records; print({'pandas', 'torch', 'triton', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def line(**changes: Any) -> str:
    values = json.loads(to_json(record()))
    values.update(changes)
    return json.dumps(values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{line()}\n{{oops\n", ":2: JSON: object keys must be strings (byte 1)"),
        ("\n", ":1: JSON: '': expected a record, a JSON object, on each line"),
        ("[1]\n", ":1: JSON: '[1]': expected a record, a JSON object, on each line"),
        (f"<<<<<<< HEAD\n{line()}\n", ":1: JSON: '<<<<<<< HEAD': expected a record, a JSON object, on each line"),
        (f"{line(colour='red')}\n", ":1: colour: 'red': expected no field of this name"),
        ('{"op": "x"}\n', ":1: variant: missing"),
        (f"{line(n='many')}\n", ":1: n: 'many': expected int | null"),
        (f"{line()}\n{line()[:40]}", ":2: JSON: truncated, the last line has no end"),
        (f"{line()}\n{line()}", ":2: JSON: truncated, the last line has no end"),
    ],
)
def test_load_of_a_broken_file_names_line_field_and_value(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        records.load(path)
    assert str(error.value) == f"{path}{message}"


def test_load_of_a_line_that_is_no_utf_8_raises(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"op": "\xff"}\n')
    with pytest.raises(ValueError) as error:
        records.load(path)
    assert str(error.value) == f"{path}:1: JSON: not readable as UTF-8 JSON"


def test_load_of_a_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        records.load(tmp_path / "none.jsonl")
    assert str(error.value) == f"cannot read {tmp_path}/none.jsonl: No such file or directory"


def test_append_into_a_folder_that_cannot_be_made_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError) as error:
        records.append(tmp_path / "file" / "r.jsonl", [record()])
    assert str(error.value) == f"cannot write {tmp_path}/file/r.jsonl: File exists"


def test_append_on_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    records.append(path, [record()])
    before = path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:100]))
    with pytest.raises(ValueError) as error:
        records.append(path, [record()])
    assert str(error.value) == f"cannot write {path}: {os.strerror(errno.ENOSPC)}"
    assert path.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_append_to_a_full_device_raises() -> None:
    with pytest.raises(ValueError, match=r"^cannot write /dev/full: No space left on device$"):
        records.append(Path("/dev/full"), [record()])


def test_append_replaces_a_truncated_last_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(line() + "\n" + line()[:40])
    records.append(path, [record(variant="baseline")])
    assert len(records.load(path)) == 2


def test_parse_of_a_row_twice_raises_unless_the_file_is_a_journal() -> None:
    lines = [f"{line()}\n".encode()] * 2
    assert len(records.parse(lines, "r.jsonl", None)) == 2
    with pytest.raises(ValueError, match=r"^r.jsonl:2: te-8192x4096: rmsnorm_fwd .* the row of line 1 again; delete one of"):
        records.parse(lines, "r.jsonl")


def test_append_of_a_nan_knob_raises_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^config: {'x': nan}: expected values that JSON can hold$"):
        records.append(tmp_path / "r.jsonl", [record(config={"x": float("nan")})])
    assert not (tmp_path / "r.jsonl").exists()


def test_from_json_of_a_row_without_samples_gives_a_record(tmp_path: Path) -> None:
    values = json.loads(to_json(record()))
    del values["samples_us"]
    assert from_json(json.dumps(values)) == record()
    kept = record(samples_us=[[43.5, 43.6], [43.4]], n=3)
    assert from_json(to_json(kept)) == kept
    with pytest.raises(ValueError, match=r"^samples_us: .*: expected none where the status is 'checked'$"):
        untimed("checked", samples_us=[[1.0]])


def test_from_json_of_a_row_without_unit_gives_a_record() -> None:
    values = json.loads(to_json(record()))
    del values["unit"]
    assert from_json(json.dumps(values)) == record()
    kept = record(unit="0123456789ab")
    assert from_json(to_json(kept)) == kept
    with pytest.raises(ValueError, match=r"^unit: 7: expected str$"):
        from_json(json.dumps(values | {"unit": 7}))


def test_merge_replaces_the_whole_file_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "r.jsonl"
    records.merge(path, [record(), record(variant="baseline")])
    records.merge(path, [record(time_us=43.2)])
    assert records.load(path) == [record(time_us=43.2), record(variant="baseline")]
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=f"^cannot write {path}: No space left on device$"):
        records.merge(path, [record(time_us=43.3)])
    assert path.read_bytes() == before
    assert [p for p in path.parent.iterdir() if p.suffix != ".lock"] == [path]


def test_merge_from_two_threads_keeps_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    records.merge(path, [record()])
    with locked(path):  # as another process holds it that has read the file and not replaced it yet
        waiting = Thread(target=records.merge, args=(path, [record(variant="baseline")]))
        waiting.start()
        time.sleep(0.2)
        assert waiting.is_alive()
        assert records.load(path) == [record()]
        records.append(path, [record(variant="pr593")])
    waiting.join()
    assert records.load(path) == [record(), record(variant="pr593"), record(variant="baseline")]
