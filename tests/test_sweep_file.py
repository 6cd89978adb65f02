"""Sweep files: cases of an entry, and errors with file, line, field and value."""

import time
from pathlib import Path
from typing import Any

import pytest

from kerneltune import cache, sweep_file
from kerneltune.plan import Options, Plan, Selection
from kerneltune.spec import Case, Op, Option, Traffic, Variant

REPO = Path(__file__).parent.parent


def fake_op(name: str, quants: tuple[str, ...], options: dict[str, tuple[Option, ...]]) -> Op:
    return Op(
        name=name,
        axes=("M", "N"),
        dtypes=("bfloat16", "float16", "float32"),
        inputs=lambda case, **_: {},
        reference=lambda inputs: {},
        compare=lambda case, inputs, outputs, expected: [],
        traffic=lambda case: Traffic(0, 0),
        variants=(Variant("baseline", lambda inputs, config: {}),),
        module=__name__,
        quants=quants,
        options=options,
    )


FWD = fake_op(
    "rmsnorm_fwd",
    ("none", "fp8", "fp8_t"),
    {"zero_centered": (False, True), "fp8_format": ("e4m3", "e5m2"), "row_pad": (0, 3, 8)},
)
BWD = fake_op("rmsnorm_bwd", ("none",), {"zero_centered": (False, True), "row_pad": (0, 3, 8)})
OPS = {op.name: op for op in (FWD, BWD)}
HEAD = "family: f\nops: [rmsnorm_fwd, rmsnorm_bwd]\n"


def read(tmp_path: Path, text: str) -> sweep_file.Sweep:
    path = tmp_path / "f.yaml"
    path.write_text(text)
    return sweep_file.load(path, OPS)


def rows(entries: tuple[sweep_file.SweepCase, ...]) -> list[str]:
    return [f"{entry.op} {entry.case.name} {entry.case.label}" for entry in entries]


def test_entry_with_lists_gives_the_product_of_its_values(tmp_path: Path) -> None:
    text = f"""{HEAD}defaults: {{dtype: float16, zero_centered: true}}
check:
  - {{name: empty, M: 0, N: 8, quant: [none, fp8]}}
bench:
  - {{name: b, op: rmsnorm_bwd, M: 1, N: 2, dtype: [bfloat16, float32], zero_centered: [false, true], row_pad: 8}}
gate: {{margin: 0.05}}
"""
    read_sweep = read(tmp_path, text)
    assert rows(read_sweep.check) == [
        "rmsnorm_fwd empty M=0 N=8 float16 none zero_centered=True fp8_format=e4m3 row_pad=0",
        "rmsnorm_fwd empty M=0 N=8 float16 fp8 zero_centered=True fp8_format=e4m3 row_pad=0",
        "rmsnorm_bwd empty M=0 N=8 float16 none zero_centered=True row_pad=0",
    ]
    assert rows(read_sweep.bench) == [
        "rmsnorm_bwd b M=1 N=2 bfloat16 none zero_centered=False row_pad=8",
        "rmsnorm_bwd b M=1 N=2 bfloat16 none zero_centered=True row_pad=8",
        "rmsnorm_bwd b M=1 N=2 float32 none zero_centered=False row_pad=8",
        "rmsnorm_bwd b M=1 N=2 float32 none zero_centered=True row_pad=8",
    ]
    assert (read_sweep.family, read_sweep.gate) == ("f", {"margin": 0.05})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("family: f\nops: [x]\nbench: [\n", ":4: YAML: expected the node content, but found '<stream end>'"),
        ("# a comment\nops: [x]\n", ":2: family: missing: expected a name"),
        ("ops: [x]\nfamily: a/b\n", ":2: family: 'a/b': expected at most 80 letters, digits, `_`, `-` and `.`"),
        ("", ":1: file: empty: expected fields with values"),
    ],
)
def test_family_with_an_invalid_name_raises_with_the_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        sweep_file.family_name(str(path))
    assert str(error.value) == f"{path}{message}"


def test_default_roots_are_in_the_current_folder_or_the_checkout_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KERNELTUNE_RESULTS", "KERNELTUNE_CONFIGS"):
        monkeypatch.delenv(name, raising=False)
    for folder, expected in ((REPO, REPO), (REPO / "docs", REPO), (tmp_path, Path())):
        monkeypatch.chdir(folder)
        assert sweep_file.results_root(None) == expected / "results"
        assert cache.default_root() == expected / "configs"
    assert cache.path_of("rmsnorm_fwd", "nvidia_h200") == REPO / "configs" / "nvidia_h200" / "rmsnorm_fwd.json"  # read behind
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    assert sweep_file.results_root(None) == Path("results")
    monkeypatch.setenv("KERNELTUNE_RESULTS", "kept")
    assert sweep_file.results_root(None) == Path("kept")
    assert sweep_file.results_root(tmp_path) == tmp_path


def test_entry_without_dtype_quant_or_option_has_every_quant_and_first_dtype_and_option(tmp_path: Path) -> None:
    labels = rows(read(tmp_path, HEAD + "bench: [{name: a, M: 4, N: 8}]").bench)
    assert labels == [
        "rmsnorm_fwd a M=4 N=8 bfloat16 none zero_centered=False fp8_format=e4m3 row_pad=0",
        "rmsnorm_fwd a M=4 N=8 bfloat16 fp8 zero_centered=False fp8_format=e4m3 row_pad=0",
        "rmsnorm_fwd a M=4 N=8 bfloat16 fp8_t zero_centered=False fp8_format=e4m3 row_pad=0",
        "rmsnorm_bwd a M=4 N=8 bfloat16 none zero_centered=False row_pad=0",
    ]


def test_dtypes_of_an_entry_may_be_short_names(tmp_path: Path) -> None:
    loaded = read(tmp_path, f"{HEAD}bench:\n  - {{name: a, op: rmsnorm_bwd, M: 1, N: 2, dtype: [bf16, fp32, half]}}\n")
    assert [entry.case.dtype for entry in loaded.bench] == ["bfloat16", "float32", "float16"]


def test_sizes_of_an_entry_may_be_decimal_or_hexadecimal(tmp_path: Path) -> None:
    loaded = read(tmp_path, f"{HEAD}bench:\n  - {{name: 'a{{M}}', op: rmsnorm_bwd, M: [+8, 1_024, 0x10], N: 1}}\n")
    assert [entry.case["M"] for entry in loaded.bench] == [8, 1024, 16]
    assert read(tmp_path, check("{name: a, op: rmsnorm_bwd, M: 0, N: 1}")).check[0].case["M"] == 0


def test_sizes_of_an_entry_may_be_lists_if_its_name_has_them(tmp_path: Path) -> None:
    bench = read(tmp_path, HEAD + "bench: [{name: 'x-{M}x{N}', op: rmsnorm_bwd, M: [1, 2], N: [3, 4]}]").bench
    assert [(entry.case.name, entry.case.axes) for entry in bench] == [
        ("x-1x3", (("M", 1), ("N", 3))),
        ("x-1x4", (("M", 1), ("N", 4))),
        ("x-2x3", (("M", 2), ("N", 3))),
        ("x-2x4", (("M", 2), ("N", 4))),
    ]


def test_shape_may_be_checked_and_timed_under_two_names(tmp_path: Path) -> None:
    """Their records are kept in different files."""
    loaded = read(tmp_path, check("{name: a, M: 1, N: 2}") + "bench: [{name: b, M: 1, N: 2}]\n")
    assert [{entry.case.name for entry in section} for section in (loaded.check, loaded.bench)] == [{"a"}, {"b"}]


def test_name_may_have_several_entries_of_one_shape(tmp_path: Path) -> None:
    text = HEAD + "bench:\n- {name: a, M: 1, N: 2, quant: none}\n- {name: a, M: 1, N: 2, quant: fp8}\n"
    assert len(read(tmp_path, text).bench) == 3


def check(entry: str) -> str:
    return f"{HEAD}check:\n  - {entry}\n"


UNSAFE = "expected a name without control characters, bidirectional marks and surrogates"
DTYPES = "bfloat16, float16, float32"
FIELDS = "name, op, M, N, dtype, quant, zero_centered, fp8_format, row_pad"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: file: empty: expected fields with values"),
        ("# nothing\n", ":1: file: empty: expected fields with values"),
        ("- 1\n", ":1: file: a list: expected fields with values"),
        ("family: [\n", ":2: YAML: expected the node content, but found '<stream end>'"),
        ("family: a\nops: [x\n", ":3: YAML: expected ',' or ']', but got '<stream end>', in what begins on line 2"),
        ("ops: [{a: 1]\n", ":1: YAML: expected ',' or '}', but got ']'"),
        ("a: 1\n---\nb: 2\n", ":2: YAML: expected a single document in the stream but found another document"),
        ("family: \x07\n", ":1: YAML: unacceptable character #x0007: special characters are not allowed"),
        ("family: f\ncheck: []\n", ":1: ops: missing: expected names of operators"),
        ("ops: rmsnorm_fwd\n", ":1: family: missing: expected a name"),
        ("family: 5\nops: rmsnorm_fwd\n", ':1: family: 5: expected text; YAML reads an integer: write "5"'),
        ("family: no\nops: rmsnorm_fwd\n", ':1: family: no: expected text; YAML reads a boolean: write "no"'),
        (f"ops: rmsnorm_fwd\nfamily: {'f' * 201}\n", ":2: family: 201 characters: expected at most 200"),
        ("family: f\nops: \x07\n", ":2: YAML: unacceptable character #x0007: special characters are not allowed"),
        (check('{name: "a\\ud800", M: 1, N: 1}'), f":4: name: 'a\\ud800': {UNSAFE}"),
        (check('{name: "a\\u202e", M: 1, N: 1}'), f":4: name: 'a\\u202e': {UNSAFE}"),
        (check('{name: "a\\x9b", M: 1, N: 1}'), f":4: name: 'a\\x9b': {UNSAFE}"),
        (check('{name: a, M: 1, N: 1, "\\ud800": 1}'), f":4: field: '\\ud800': expected one of {FIELDS}"),
        (check("{name: a, M: !!seq 1, N: 1}"), ":4: M: '1': expected a plain value"),
        (
            check(f"{{name: '{'a' * 190}{{M}}{{N}}', M: {2**44}, N: 1}}"),
            ":4: name: 205 characters: expected at most 200, with the sizes in it",
        ),
        ("family: ../f\nops: rmsnorm_fwd\n", ":1: family: '../f': expected at most 80 letters, digits, `_`, `-` and `.`"),
        (
            f"family: {'f' * 81}\nops: rmsnorm_fwd\n",
            f":1: family: '{'f' * 81}': expected at most 80 letters, digits, `_`, `-` and `.`",
        ),
        ('family: "a\\0b"\nops: rmsnorm_fwd\n', f":1: family: 'a\\x00b': {UNSAFE}"),
        (check("{name: a, M: !!int '', N: 1}"), ":4: M: '': expected a plain value"),
        (check("{name: a, M: !!bool zz, N: 1}"), ":4: M: 'zz': expected a plain value"),
        (check("{name: a, M: !!timestamp zz, N: 1}"), ":4: M: 'zz': expected a plain value"),
        (check(f"{{name: a, M: {2**48 + 1}, N: 1}}"), f":4: M: {2**48 + 1}: expected at most {2**48}"),
        (
            "family: f\nops: [gemm]\n",
            ":2: ops: 'gemm': expected one of rmsnorm_fwd, rmsnorm_bwd, or an operator that --plugin or --captured loads",
        ),
        ("family: f\nops: []\n", ":2: ops: []: expected at least one value"),
        ("family: f\nfamily: g\n", ":2: family: 'g': expected each field once"),
        (
            f"{HEAD}benches: 1\n",
            ":3: field: 'benches': did you mean bench? expected one of family, defaults, ops, check, bench, headline, gate",
        ),
        (HEAD, ":1: check: missing: expected at least one entry in check or bench"),
        (f"{HEAD}check: {{M: 1}}\n", ":3: check: a mapping: expected a list of entries"),
        (f"{HEAD}check: [5]\n", ":3: check: '5': expected fields with values"),
        (check("{M: 1, N: 1}"), ":4: name: missing: expected a name"),
        (check("{name: 1, M: 1, N: 1}"), ':4: name: 1: expected text; YAML reads an integer: write "1"'),
        (check("{name: , M: 1, N: 1}"), ":4: name: empty: expected a name"),
        (check("{name: '', M: 1, N: 1}"), ":4: name: empty: expected a name"),
        (check("{name: a b, M: 1, N: 1}"), ":4: name: 'a b': expected a name without blanks"),
        (check("{name: a, M: 1}"), ":4: N: missing: expected the size of this axis of rmsnorm_fwd"),
        (check("{name: a, M: 1, N: 1, M: 2}"), ":4: M: '2': expected each field once"),
        (check("{name: a, M: -1, N: 1}"), ":4: M: -1: expected an integer of 0 or more"),
        (check("{name: a, M: 010, N: 1}"), ":4: M: 010, which YAML reads as 8: expected a size in decimal or hexadecimal digits"),
        (
            check("{name: a, M: 1:30, N: 1}"),
            ":4: M: 1:30, which YAML reads as 90: expected a size in decimal or hexadecimal digits",
        ),
        (check("{name: a, M: 1, N: 1, dtype: [bf16, bfloat16]}"), ":4: dtype: 'bfloat16': expected each value once"),
        (check("{name: a, M: true, N: 1}"), ":4: M: True: expected an integer of 0 or more"),
        (check("{name: a, M: '8', N: 1}"), ":4: M: '8': expected an integer of 0 or more"),
        (check("{name: a, M: 1.5, N: 1}"), ":4: M: 1.5: expected an integer of 0 or more"),
        (check("{name: a, M: 8, N: {x: 1}}"), ":4: N: a mapping: expected a plain value"),
        (check("{name: a, M: 8, N: [[1]]}"), ":4: N: a list: expected a plain value"),
        (check("{name: a, M: !!python/name:os.system 8, N: 1}"), ":4: M: '8': expected a plain value"),
        (check("{name: a, M: 8, N: [1, 2]}"), ":4: name: 'a': expected a name with {N} in it, as N has several sizes"),
        (check("{name: 'a{K}', M: 8, N: 1}"), ":4: name: 'a{K}': expected no placeholders but {M}, {N}"),
        (check("{name: 'a{M}', M: [8, 8], N: 1}"), ":4: M: 8: expected each value once"),
        (check("{name: a, M: 8, N: 1, K: 4}"), f":4: field: 'K': expected one of {FIELDS}"),
        (check("{name: a, M: 8, N: 1, NN: 4}"), f":4: field: 'NN': did you mean N? expected one of {FIELDS}"),
        (check("{name: a, M: 8, N: 1, op: gemm}"), ":4: op: 'gemm': expected one of rmsnorm_fwd, rmsnorm_bwd"),
        (
            f"{HEAD}bench:\n  - {{name: a, M: 8, N: 1}}\nheadline: {{cases: a}}\n",
            ":5: headline: 'cases': did you mean case? expected one of op, case, dtype, quant",
        ),
        (
            f"{HEAD}bench:\n  - {{name: a, M: 8, N: 1}}\nheadline: {{case: b, op: rmsnorm_fwd}}\n",
            ":5: headline: case b, op rmsnorm_fwd: expected what at least one bench case has",
        ),
        (
            check("{name: a, M: 8, N: 1, dtype: bfloat}"),
            ":4: dtype: 'bfloat': did you mean bfloat16? expected one of bfloat16, float16, float32",
        ),
        (check("{name: a, M: 8, N: 1, dtype: 16}"), ":4: dtype: 16: expected one of bfloat16, float16, float32"),
        (check("{name: a, M: 8, N: 1, quant: [none, int8]}"), ":4: quant: 'int8': expected one of none, fp8, fp8_t"),
        (check("{name: a, M: 8, N: 1, op: rmsnorm_bwd, quant: fp8}"), ":4: quant: 'fp8': expected one of none"),
        (check("{name: a, M: 8, N: 1, zero_centered: 1}"), ":4: zero_centered: 1: expected one of false, true"),
        (check("{name: a, M: 8, N: 1, row_pad: 4}"), ":4: row_pad: 4: expected one of 0, 3, 8"),
        (check("{name: a, M: 8, N: 1, row_pad: false}"), ":4: row_pad: False: expected one of 0, 3, 8"),
        (check("{name: a, M: 8, N: 1, row_pad: null}"), ":4: row_pad: None: expected one of 0, 3, 8"),
        (
            check("{name: a, M: 8, N: 1, op: rmsnorm_bwd, fp8_format: e5m2}"),
            ":4: field: 'fp8_format': expected one of name, op, M, N, dtype, quant, zero_centered, row_pad",
        ),
        (f"{HEAD}bench: [{{name: a, M: 0, N: 1}}]\n", ":3: M: 0: expected an integer of 1 or more"),
        (
            check("{name: a, M: 1, N: 1}\n  - {name: b, M: 2, N: 1}\n  - {name: a, M: 1, N: 1}"),
            ":6: name: 'a': expected a name not used for rmsnorm_fwd on line 4",
        ),
        (
            check("{name: a, M: 1, N: 1, quant: none}\n  - {name: a, M: 2, N: 1, quant: fp8}"),
            ":5: name: 'a': expected a name not used for rmsnorm_fwd on line 4",
        ),
        (
            check("{name: a, M: 1, N: 1, quant: none}\n  - {name: b, M: 1, N: 1, quant: [fp8, none]}"),
            ":5: name: 'b': expected sizes or options of rmsnorm_fwd not used by 'a' on line 4",
        ),
        (f"{HEAD}defaults: {{name: a}}\n", f":3: field: 'name': expected one of {FIELDS[10:]}"),
        (f"{HEAD}defaults: {{dtype: bf17}}\n", f":3: dtype: 'bf17': did you mean bf16? expected one of {DTYPES}"),
        (f"{HEAD}defaults: {{M: -2}}\n", ":3: M: -2: expected an integer of 0 or more"),
        (check("{name: a, M: 1, N: 1}\ngate: 3"), ":5: gate: '3': expected fields with values"),
        (check("{name: a, M: 1, N: 1}\ngate: {margn: 3}"), ":5: gate: 'margn': did you mean margin? expected one of margin"),
        (check("{name: a, M: 1, N: 1}\ngate: {margin: 1}"), ":5: gate.margin: 1: expected a fraction from 0 to below 1"),
        (check("{name: a, M: 1, N: 1}\ngate: {margin: yes}"), ":5: gate.margin: True: expected a fraction from 0 to below 1"),
        (check("{name: a, M: 1, N: 1}\ngate: {margin: .nan}"), ":5: gate.margin: nan: expected a fraction from 0 to below 1"),
    ],
)
def test_broken_sweep_file_raises_with_file_line_field_and_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        read(tmp_path, text)
    assert str(error.value) == f"{tmp_path}/f.yaml{message}"


def test_sweep_file_that_is_missing_or_no_utf_8_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        sweep_file.load(tmp_path / "f.yaml", OPS)
    assert str(error.value) == f"cannot read {tmp_path}/f.yaml: No such file or directory"
    (tmp_path / "f.yaml").write_bytes(b"family: f\n# \xff")
    with pytest.raises(ValueError) as error:
        sweep_file.load(tmp_path / "f.yaml", OPS)
    assert str(error.value) == f"{tmp_path}/f.yaml:2: byte 0xff: expected UTF-8"


def test_load_time_grows_linearly_with_the_number_of_sizes(tmp_path: Path) -> None:
    def seconds(values: int) -> float:
        sizes = ", ".join(map(str, range(1, values + 1)))
        begun = time.process_time()
        loaded = read(tmp_path, f"{HEAD}bench:\n  - {{name: 'a{{M}}', op: rmsnorm_bwd, N: 8, M: [{sizes}]}}\n")
        assert len(loaded.bench) == values
        return time.process_time() - begun

    turns = [(seconds(250), seconds(3000)) for _ in range(4)]  # in turns, as the machine's speed changes
    few, many = map(min, zip(*turns, strict=True))
    assert many < 3 * 12 * few, "144 times where each value is compared with every other"


def test_sweep_file_with_more_cases_than_the_limit_raises_before_it_builds_them(tmp_path: Path) -> None:
    sizes = ", ".join(map(str, range(1, 1001)))
    text = f"{HEAD}bench:\n  - {{name: '{{M}}x{{N}}', op: rmsnorm_bwd, N: [{sizes}], M: [{sizes}]}}\n"
    with pytest.raises(ValueError, match=r"f\.yaml:4: cases: 1000000 or more: expected at most 100000$"):
        read(tmp_path, text)


def test_sweep_file_above_1_mib_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"f\.yaml: 1048580 bytes: expected at most 1048576$"):
        read(tmp_path, "#" * (2**20 + 4))


def test_find_of_a_family_returns_its_file_or_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_file, "data_root", lambda folder: tmp_path / "repo" / folder)
    for path in ("repo/sweeps/norm.yaml", "repo/sweeps/gemm.yaml", "sweeps/norm.yaml"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    Path("sweeps/folder.yaml").mkdir()
    Path("capture_of_a_layer/classes").mkdir(parents=True)
    assert sweep_file.find("norm") == Path("sweeps/norm.yaml")
    assert sweep_file.find("gemm") == tmp_path / "repo/sweeps/gemm.yaml"
    assert sweep_file.find("repo/sweeps/norm.yaml") == Path("repo/sweeps/norm.yaml")
    with pytest.raises(ValueError, match=r"^family: 'nrom': did you mean norm[?] expected one of gemm, norm, "):
        sweep_file.find("nrom")
    with pytest.raises(ValueError, match=r"^family: 'capture_of_layer': did you mean capture_of_a_layer[?] expected one of "):
        sweep_file.find("capture_of_layer")
    with pytest.raises(ValueError, match=r"^cannot read nrom\.yaml: no such file$"):
        sweep_file.find("nrom.yaml")
    with pytest.raises(ValueError, match=r"^family: 'folder': expected one of gemm, norm, capture_of_a_layer, or a "):
        sweep_file.find("folder")
    with pytest.raises(ValueError, match=r"^cannot read sweeps/folder\.yaml: Is a directory$"):
        sweep_file.load(sweep_file.find("sweeps/folder.yaml"), OPS)


def count(entries: tuple[sweep_file.SweepCase, ...], **wanted: Any) -> int:
    return sum(all(getattr(entry.case, name) == value for name, value in wanted.items()) for entry in entries)


def test_headline_of_a_sweep_has_10_cases_across_its_sizes(tmp_path: Path) -> None:
    bench = "bench:\n" + "".join(
        f"  - {{name: {name}-{size}, M: {size}, N: {n}}}\n" for name, n in (("a", 64), ("b", 96)) for size in range(1, 13)
    )
    plain = read(tmp_path, HEAD + bench)
    across = [entry.case.name for entry in Plan(OPS, plain, Selection("f", ops=("rmsnorm_bwd",)), Options()).headline()]
    assert across == [f"{name}-{size}" for name, size in zip("aaaaabbbbb", (1, 3, 5, 8, 10) * 2, strict=True)]
    named = read(tmp_path, f"{HEAD}{bench}headline: {{op: rmsnorm_fwd, case: b-1*, quant: fp8_t}}\n")
    headline = Plan(OPS, named, Selection("f"), Options()).headline()
    assert [(entry.op, entry.case.name, entry.case.quant) for entry in headline] == [
        ("rmsnorm_fwd", f"b-{size}", "fp8_t") for size in (1, 10, 11, 12)
    ]
    assert len(Plan(OPS, named, Selection("f", ops=("rmsnorm_bwd",)), Options()).headline()) == 10


def test_shipped_rmsnorm_sweep_has_the_published_cases() -> None:
    rmsnorm = sweep_file.load(REPO / "sweeps" / "rmsnorm.yaml", OPS)
    assert 25 <= len(rmsnorm.check) <= 40, "all run through the interpreter"
    for sizes in ((29, 17389), (3, 131072)):
        big = [entry for entry in rmsnorm.check if entry.case.axes == (("M", sizes[0]), ("N", sizes[1]))]
        assert [(entry.op, entry.case.quant, entry.case.dtype) for entry in big] == [
            ("rmsnorm_fwd", "none", "bfloat16"),
            ("rmsnorm_fwd", "fp8", "bfloat16"),
            ("rmsnorm_fwd", "fp8_t", "bfloat16"),
            ("rmsnorm_bwd", "none", "bfloat16"),
        ]
    published = [entry for entry in rmsnorm.bench if entry.case.name.startswith("te-")]
    assert len({entry.case.axes for entry in published}) == 10
    assert len(published) == 80
    assert count(published, dtype="float16") == 40
    assert len({(entry.op, entry.case) for entry in rmsnorm.bench}) == len(rmsnorm.bench)
    assert rmsnorm.gate == {"margin": 0.03}


def test_sweep_text_of_cases_is_read_as_the_same_cases_each_once(tmp_path: Path) -> None:
    options = (("zero_centered", True), ("row_pad", 8))
    named = Case("a-name", (("M", 4), ("N", 8)), "float16", "none", options)
    unnamed = Case("", (("M", 16), ("N", 8)), "bfloat16", "fp8", (("fp8_format", "e5m2"), *options))
    text = sweep_file.sweep_text(
        "what they are", "f", {"check": [], "bench": [("rmsnorm_bwd", named), *[("rmsnorm_fwd", unnamed)] * 2]}
    )
    assert text.startswith("# what they are\nfamily: f\n")
    read_sweep = read(tmp_path, text)
    assert read_sweep.check == ()
    (first, second) = read_sweep.bench
    assert (first.op, first.case) == ("rmsnorm_bwd", named)
    assert (second.op, second.case.name, dict(second.case.options)) == ("rmsnorm_fwd", "rmsnorm_fwd-16x8", dict(unnamed.options))
