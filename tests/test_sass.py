"""The machine code in the built library: which instruction converts to E2M1, on which architecture,
that a kernel whose shared memory leaves no cache spills nothing, that what may start early waits,
that two kernels fit side by side, and that no sum depends on who comes first.

Blackwell has `cvt.rn.satfinite.e2m1x2.f32` (F2FP...E2M1 in its machine code); elsewhere the same
source rounds in software. cuobjdump and nvdisasm come from the index, no GPU or toolkit is needed.
"""

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

import nvfp4_linear

LIBRARY = Path(nvfp4_linear.__file__).parent / "_C.so"
CONVERSION = re.compile(r"\bF2FP\.SATFINITE\.E2M1\.F32\b")
# A block of 16 elements, two at a time.
PAIRS = 8


def tool(name: str) -> str:
    """Path of one of NVIDIA's tools, of its package or on the PATH."""
    spec = find_spec("nvidia")
    for base in spec.submodule_search_locations if spec else ():
        found = Path(base) / "cu13" / "bin" / name
        if found.exists():
            return str(found)
    if on_path := shutil.which(name):
        return on_path
    pytest.skip(f"needs {name}: pip install nvidia-cuda-{name}")


def machine_code(arch: str, kernel: str, folder: Path) -> dict[str, str]:
    """Function name to machine code, of every `kernel` that the library has for `arch`."""
    extract = [tool("cuobjdump"), "-arch", arch, "-xelf", "all", str(LIBRARY)]
    subprocess.run(extract, cwd=folder, capture_output=True, text=True)
    cubins = [
        c for c in folder.glob("*.cubin") if f"{len(kernel)}{kernel}".encode() in c.read_bytes()
    ]
    if not cubins:
        pytest.skip(f"needs a build for {arch}: this library has no {kernel} for it")
    functions: dict[str, str] = {}
    for cubin in cubins:
        command = [tool("nvdisasm"), "-c", str(cubin)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        sections = re.split(r"^\s*\.section\s+\.text\.(\S+?),.*$", text, flags=re.M)
        functions |= dict(zip(sections[1::2], sections[2::2], strict=True))
    return {name: code for name, code in functions.items() if f"{len(kernel)}{kernel}" in name}


@pytest.mark.parametrize("arch", ["sm_100f", "sm_120f"])
def test_blackwell_converts_in_hardware(arch, tmp_path):
    kernels = machine_code(arch, "quantize_kernel", tmp_path)
    # FP32, BF16 and FP16; quantize and swiglu_quantize; aligned and not
    assert len(kernels) == 12
    for name, code in kernels.items():
        assert len(CONVERSION.findall(code)) == PAIRS, name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_elsewhere_software_does(arch, tmp_path):
    kernels = machine_code(arch, "quantize_kernel", tmp_path)
    assert len(kernels) == 12
    for name, code in kernels.items():
        assert "E2M1" not in code, name
        assert "FFMA" in code, name  # it is the machine code of the kernel that was looked at


def test_grouped_wgmma_spills_nothing(tmp_path):
    """A word spilled took a microsecond to come back, 28 % of the kernel's time in all: with this
    much shared memory there is hardly any L1.
    """
    kernels = machine_code("sm_90a", "grouped_wgmma_kernel", tmp_path)
    assert len(kernels) == 4  # BF16 and FP16; tiles of 16 and 64 rows
    for name, code in kernels.items():
        assert "HGMMA" in code, name
        assert not re.search(r"\b(LDL|STL)\b", code), name


@pytest.mark.parametrize(
    "kernel",
    ["quantize_kernel", "dequantize_kernel", "epilogue_kernel", "amax_kernel", "finish_kernel"],
)
def test_what_may_start_early_waits_before_it_touches_memory(kernel, tmp_path):
    """ACQBULK is `griddepcontrol.wait`: until the kernel ahead is over."""
    kernels = machine_code("sm_90a", kernel, tmp_path)
    assert kernels
    for name, code in kernels.items():
        touches = re.search(r"\b(LDG|STG|LD|ST|ATOMG?|REDG?|LDGSTS)\b", code)
        assert touches, name  # the machine code of a kernel that reads or writes
        assert "ACQBULK" in code[: touches.start()], name


def registers(arch: str, kernel: str) -> list[int]:
    """Of a thread, for every `kernel` that the library has for `arch`."""
    command = [tool("cuobjdump"), "-arch", arch, "-res-usage", str(LIBRARY)]
    text = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.findall(rf"Function \S*{len(kernel)}{kernel}\S*:\s+REG:(\d+)", text)
    if not found:
        pytest.skip(f"needs a build for {arch}: this library has no {kernel} for it")
    return [int(x) for x in found]


def test_arranging_and_multiplying_fit_one_multiprocessor():
    """Else grouped_wgmma starts when the last of its rows are arranged, not beside that."""
    arranging = registers("sm_90a", "unpack_kernel")
    multiplying = registers("sm_90a", "grouped_wgmma_kernel")
    assert len(arranging) == len(multiplying) == 4
    assert 128 * max(arranging) + 384 * max(multiplying) <= 65536


def test_counters_are_zero_before_another_kernel_may_read_them(tmp_path):
    """PREEXIT is `griddepcontrol.launch_dependents`: grouped_wgmma starts and reads the counters."""
    kernels = machine_code("sm_90a", "unpack_kernel", tmp_path)
    assert len(kernels) == 4
    for name, code in kernels.items():
        order = re.findall(r"\b(STG|MEMBAR|PREEXIT|LDG)\b", code)
        before = order[: order.index("PREEXIT")]
        assert before.count("STG") >= 2 and before[-1] == "MEMBAR", (name, order[:10])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_atomic_on_floats(arch):
    """Every run gives the same bytes: atomics count, and nothing else."""
    command = [tool("cuobjdump"), "-arch", arch, "-sass", str(LIBRARY)]
    text = subprocess.run(command, capture_output=True, text=True).stdout
    atomics = set(re.findall(r"\s((?:ATOM|RED)[A-Z]?\.\S+)", text))
    if not atomics:
        pytest.skip(f"needs a build for {arch}: this library has none of its atomics")
    assert not [x for x in atomics if re.search(r"\.B?F(16|32|64)", x)], atomics
