"""Names of tests: subject, condition, result."""

import ast
import re
from pathlib import Path

import pytest
from asserting import every

FILES = sorted(Path(__file__).parent.rglob("test_*.py"))
WITHOUT_A_SUBJECT = re.compile(r"test_(an?|the|what|so|such|nothing|no|those|it)_")
WITHOUT_A_RESULT = re.compile(r"_(says_so|is_told_so|is_one_line|are_one_line)$")


def problems(names: list[str]) -> list[str]:
    return [name for name in names if name.count("_") < 3 or WITHOUT_A_SUBJECT.match(name) or WITHOUT_A_RESULT.search(name)]


def test_problems_of_names_without_subject_or_result_are_found() -> None:
    riddles = [
        "test_holm",
        "test_what_is_paid_for",
        "test_so_is_one_of_this_gpu",
        "test_a_bad_margin",
        "test_gate_of_no_gpu_says_so",
    ]
    assert problems([*riddles, "test_gate_without_a_gpu_fails"]) == riddles


@pytest.mark.parametrize("folder", sorted({str(path.parent.relative_to(Path(__file__).parent)) for path in FILES}))
def test_names_of_tests_have_subject_and_result(folder: str) -> None:
    trees = [ast.parse(path.read_text()) for path in FILES if str(path.parent.relative_to(Path(__file__).parent)) == folder]
    names = [node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    tests = [name for name in names if name.startswith("test_")]
    assert every(problems([name]) == [] for name in tests), problems(tests)


def test_names_of_test_files_in_all_folders_differ() -> None:
    names = [path.name for path in FILES]
    assert [name for name in set(names) if names.count(name) > 1] == []  # pytest imports one module of each name
