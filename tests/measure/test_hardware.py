"""The line that names a record's machine."""

import platform

import pytest

from common.measure.hardware import cpu_name

NAMED = "model name\t: AMD EPYC\n"
WHOLE = "cpu family\t: 25\nmodel\t\t: {}\n" + NAMED + "flags\t\t: fpu {}\n"


@pytest.mark.parametrize(
    ("told", "name"),
    [
        (WHOLE.format(1, "avx2"), "AMD EPYC (family 25 model 1 no bf16)"),
        (WHOLE.format(17, "avx512_bf16"), "AMD EPYC (family 25 model 17 avx512_bf16)"),
        (WHOLE.format(17, "avx512_bf16 amx_bf16"), "AMD EPYC (family 25 model 17 amx_bf16)"),
        (NAMED, "AMD EPYC"),
        ("processor\t: 0\n", platform.processor() or platform.machine()),
    ],
)
def test_a_processors_name_tells_its_model_where_the_system_does(told, name, tmp_path):
    (tmp_path / "cpuinfo").write_text(told)
    assert cpu_name(tmp_path / "cpuinfo") == name
    assert cpu_name(tmp_path / "none") == (platform.processor() or platform.machine())
