"""The random mutants: what is drawn, and what is said of it. No suite runs here."""

import ast
from pathlib import Path

from random_mutants import DIED, ROOT, SOURCES, SURVIVED, TIMED_OUT, draw, last_test, mutants_of, watched

SOURCE = '''"""Ψ."""
import math
class C:
    """C."""
    width: int
    def f(self, x):
        """F."""
        if x > 1:
            return [
                y for y in x if y]
        elif not x:
            pass
        assert x; x = "Ψ"; return 1 if x else 2
'''
IF = "if x > 1:\n            return [\n                y for y in x if y]\n        elif not x:\n            pass"


def test_every_statement_is_deleted_and_every_condition_negated():
    source = SOURCE.encode()
    found = [(mutant.kind, source[mutant.start : mutant.end].decode()) for mutant in mutants_of("a.py", source)]
    deleted = [IF, "return [\n                y for y in x if y]", "elif not x:\n            pass"]
    deleted += ["assert x", 'x = "Ψ"', "return 1 if x else 2"]
    assert [text for kind, text in found if kind == "delete"] == deleted
    assert [text for kind, text in found if kind == "negate"] == ["x > 1", "y", "not x", "x", "x"]


def test_a_mutant_changes_its_lines_alone_and_is_python():
    for mutant in draw(10, 0, SOURCES):
        source = (ROOT / mutant.file).read_bytes()
        changed = mutant.of(source)
        assert changed.startswith(source[: mutant.start])
        assert changed.endswith(source[mutant.end :])
        assert source.decode().splitlines()[mutant.line - 1] == mutant.text.splitlines()[0]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


def test_the_same_seed_draws_the_same_and_none_twice():
    assert draw(20, 0, SOURCES[:1]) == draw(20, 0, SOURCES[:1]) != draw(20, 1, SOURCES[:1])
    assert len(set(draw(20, 0, SOURCES[:1]))) == 20


def test_what_hangs_is_killed_with_all_that_it_started(tmp_path):
    status, output = watched(["sh", "-c", "sleep 60 & echo $!; sleep 60"], tmp_path, limit=0.3)
    assert status is None
    state = Path(f"/proc/{output.strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_what_ends_has_its_exit_status(tmp_path):
    assert watched(["sh", "-c", "echo some; sleep 0.1; exit 3"], tmp_path, limit=60) == (3, "some\n")


def test_the_test_that_failed_or_hung_is_named():
    passed, failed = "tests/test_a.py::a[b c] PASSED [ 1%]\n", "tests/test_a.py::b[d e] FAILED [ 2%]\n"
    assert last_test(DIED, passed + failed + "=== 1 failed ===") == "tests/test_a.py::b[d e]"
    assert last_test(TIMED_OUT, passed + "tests/test_a.py::c ") == "tests/test_a.py::c"
    assert last_test(DIED, "NameError: nonsense\n") == "NameError: nonsense"
    assert last_test(SURVIVED, passed) is None
