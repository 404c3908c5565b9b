"""Reading compute-sanitizer's reports, from its printed formats."""

from tests.kernels.triton.sanitizer_report import Finding, findings, table

TEXT = """========= COMPUTE-SANITIZER
some line of the program
========= Invalid __global__ read of size 4 bytes
=========     at _forward_kernel+0x1d0 in forward.py:72
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f2e is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch in launcher.c:10 [0x1230]
=========
========= Invalid __global__ read of size 4 bytes
=========     at _forward_kernel+0x1d0 in forward.py:72
=========     by thread (1,0,0) in block (0,0,0)
========= Uninitialized __global__ memory read of size 2 bytes
=========     at void at::native::vectorized<4, float>(int, float*)+0x70
========= Uninitialized __global__ memory read of size 1 bytes
=========     at _dq_kernel+0x70
========= Error: Race reported between Write access at _dk_dv_kernel+0x300 in backward.py:50
=========     and Read access at _dk_dv_kernel+0x340 in backward.py:60 [256 hazards]
========= Error: Race reported between Write access at planted_race(float *)+0x30
=========     and Read access at planted_race(float *)+0x70 [4 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
========= ERROR SUMMARY: 4 errors
"""


def test_reports_name_their_kernel() -> None:
    found = findings(TEXT)
    read = Finding("Invalid __global__ read of size 4 bytes", "_forward_kernel", "forward.py:72")
    assert found[read] == 2
    race = Finding("Error: Race reported between Write access", "_dk_dv_kernel", "backward.py:50")
    assert found[race] == 1
    kernels = [f.kernel for f in found]
    assert kernels.count("_dq_kernel") == 1
    assert kernels.count("planted_race") == 1
    assert len(found) == 5
    assert table(found).splitlines()[0].split()[:3] == ["2", "_forward_kernel", "forward.py:72"]


def test_a_clean_run_has_no_findings() -> None:
    assert not findings("========= COMPUTE-SANITIZER\nok\n========= ERROR SUMMARY: 0 errors\n")
