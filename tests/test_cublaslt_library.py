"""The promise: whatever cuBLASLt the machine has, loading it ends in a library or in a reason a
person can act on; and what we believe of its numbers is what its own header says.
"""

import ctypes
import os
import re
import subprocess
import sys

import fake_cublaslt
import pytest

from nvfp4_linear import _cublaslt as lt

SMALL = ("nvfp4", 256, 256, 256)
GB10 = lt.DeviceInfo(12, 1, 4)


def real_library():
    package = fake_cublaslt.cublas_package()
    path = package / "lib" / "libcublasLt.so.13" if package else None
    if path is None or not path.exists():
        pytest.skip("needs the nvidia-cublas package, found none")
    return str(path)


def run_python(code, **environment):
    """Standard output of `code`, which prints one repr, in a process of its own."""
    merged = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], env=merged, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def refusals_of(planner):
    plan = planner.plan(lt.Problem(*SMALL, GB10))
    assert not plan.ok
    assert [rung for rung, _ in plan.refusals] == ["cublaslt-pinned", "cublaslt-heuristic"]
    reasons = {reason for _, reason in plan.refusals}
    assert len(reasons) == 1
    return reasons.pop()


def test_an_absent_library_is_a_reason_with_a_remedy(tmp_path):
    planner = lt.Planner(str(tmp_path / "libcublasLt.so.13"))
    reason = refusals_of(planner)
    assert reason.startswith("cuBLASLt could not be loaded: ") and str(tmp_path) in reason
    assert (
        "install nvidia-cublas>=13.0,<14, or name the library in NVFP4_CUBLASLT_LIBRARY" in reason
    )
    assert reason.endswith("(m=256, n=256, k=256)")
    assert planner.library["unavailable"] and planner.library["version"] == 0
    answer = planner.check(lt.Problem(*SMALL, GB10), lt.Algorithm(id=70, tile=20, stages=37))
    assert not answer["ok"] and "could not be loaded" in answer["reason"]


def test_a_library_without_a_symbol_is_named_with_version_path_and_symbol():
    fake = fake_cublaslt.Fake("FAKE_WITHOUT_ALGO_CHECK")
    reason = refusals_of(lt.Planner(fake.path))
    assert reason.startswith(
        f"cuBLASLt 13.1.0 ({fake.path}) is older than the symbols need: "
        "it lacks cublasLtMatmulAlgoCheck: install nvidia-cublas>=13.0,<14"
    )


@pytest.mark.parametrize("version, text", [(120805, "12.8.5"), (140000, "14.0.0")])
def test_a_library_of_another_major_version_is_refused_by_its_version(version, text):
    fake = fake_cublaslt.Fake()
    fake.configure(version=version)
    assert refusals_of(lt.Planner(fake.path)).startswith(
        f"cuBLASLt {text} ({fake.path}) is outside the versions this build can drive"
    )


@pytest.mark.parametrize("version", [130000, 130100, 131000, 139999])
def test_every_13_is_taken(version):
    fake = fake_cublaslt.Fake()
    fake.configure(version=version)
    planner = lt.Planner(fake.path)
    assert planner.library["version"] == version and planner.library["unavailable"] == ""
    assert planner.plan(lt.Problem(*SMALL, GB10)).ok


def test_a_library_that_is_no_library(tmp_path):
    path = tmp_path / "libcublasLt.so.13"
    path.write_text("not an ELF file")
    assert "could not be loaded" in refusals_of(lt.Planner(str(path)))


def test_the_environment_names_the_library():
    fake = fake_cublaslt.Fake()
    code = "from nvfp4_linear import _cublaslt as lt; print(lt.planner().library)"
    library = run_python(code, NVFP4_CUBLASLT_LIBRARY=fake.path)
    assert f"'path': '{fake.path}'" in library and "'version': 130100" in library
    library = run_python(code, NVFP4_CUBLASLT_LIBRARY="/nowhere/libcublasLt.so.13")
    assert "could not be loaded: /nowhere/libcublasLt.so.13" in library


def test_the_copy_already_in_the_process_is_the_one_that_is_used():
    """As torch's is: one cuBLASLt a process, though the loader could not find it by itself."""
    path = real_library()
    code = f"""
import ctypes, os
os.environ.pop("NVFP4_CUBLASLT_LIBRARY", None)
ctypes.CDLL({path!r})
from nvfp4_linear import _cublaslt as lt
print(os.path.realpath(lt.planner().library["path"]) == os.path.realpath({path!r}))
"""
    assert run_python(code) == "True"


# ---- Facts shared by the header, the real library and the double ----------------------------------


def header_enum(prefix):
    text = fake_cublaslt.header().read_text()
    found = re.findall(rf"\b{prefix}_(\w+) = (\d+)", text)
    return {int(value): name for name, value in found}


def test_names_are_the_headers_own():
    """Above all the tiles, which the extension derives by a rule."""
    tiles = header_enum("CUBLASLT_MATMUL_TILE")
    assert len(tiles) == lt.TILE_END
    assert {i: lt.tile_name(i) for i in tiles} == {**tiles, 0: "undefined"}
    stages = header_enum("CUBLASLT_MATMUL_STAGES")
    assert {i: lt.stages_name(i) for i in stages} == {**stages, 0: "undefined"}
    clusters = header_enum("CUBLASLT_CLUSTER_SHAPE")
    assert {i: lt.cluster_name(i) for i in clusters} == {**clusters, 0: "auto"}
    inner = header_enum("CUBLASLT_MATMUL_INNER_SHAPE")
    assert {i: lt.inner_name(i) for i in inner} == {i: n.lower() for i, n in inner.items()}
    for name in (lt.tile_name, lt.stages_name, lt.cluster_name, lt.inner_name):
        assert name(-1) == name(10**6) == "unknown"


def test_ends_are_the_headers_own_and_gaps_are_refused():
    version = lt.HEADER_VERSION
    stages = header_enum("CUBLASLT_MATMUL_STAGES")
    clusters = header_enum("CUBLASLT_CLUSTER_SHAPE")
    assert (max(stages) + 1, max(clusters) + 1) == (lt.STAGES_END, lt.CLUSTER_END)
    for stage in range(lt.STAGES_END):
        fine = lt.out_of_range(lt.Algorithm(id=70, tile=20, stages=stage), version) == ""
        assert fine == (stage in stages)
    for cluster in range(lt.CLUSTER_END):
        algorithm = lt.Algorithm(id=70, tile=20, stages=37, cluster=cluster)
        assert (lt.out_of_range(algorithm, version) == "") == (cluster in clusters)


@pytest.fixture(params=["double", "real"])
def library(request):
    """The double's and the real library's raw functions, by ctypes."""
    if request.param == "double":
        return ctypes.CDLL(fake_cublaslt.Fake().path)
    return ctypes.CDLL(real_library())


def test_version_and_status_names(library):
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    library.cublasLtGetStatusName.restype = ctypes.c_char_p
    assert 130000 <= library.cublasLtGetVersion() < 140000
    names = {status: library.cublasLtGetStatusName(status).decode() for status in range(17)}
    assert names[0] == "CUBLAS_STATUS_SUCCESS"
    assert names[7] == "CUBLAS_STATUS_INVALID_VALUE"
    assert names[8] == "CUBLAS_STATUS_ARCH_MISMATCH"
    assert names[15] == "CUBLAS_STATUS_NOT_SUPPORTED"
    assert not names[2].startswith("CUBLAS_STATUS_")
    assert library.cublasLtGetStatusName(99) == b"unrecognized status"


# Attribute ids and widths of everything that operation.cpp sets.
DESCRIPTOR_BYTES = {2: 4, 3: 4, 4: 4, 7: 4, 8: 8, 17: 8, 18: 8, 26: 4, 31: 4, 32: 4}
PREFERENCE_BYTES = {1: 8, 5: 4, 6: 4, 7: 4, 8: 4}


@pytest.mark.parametrize("kind, widths", [
    ("MatmulDesc", DESCRIPTOR_BYTES), ("MatmulPreference", PREFERENCE_BYTES),
])  # fmt: skip
def test_attribute_widths(library, kind, widths):
    created = ctypes.c_void_p()
    arguments = [68, 0] if kind == "MatmulDesc" else []  # CUBLAS_COMPUTE_32F, CUDA_R_32F
    assert getattr(library, f"cublasLt{kind}Create")(ctypes.byref(created), *arguments) == 0
    set_attribute = getattr(library, f"cublasLt{kind}SetAttribute")
    value = ctypes.c_uint64(1)
    for attribute, right in widths.items():
        for width in (1, 2, 4, 8):
            status = set_attribute(created, attribute, ctypes.byref(value), ctypes.c_size_t(width))
            assert (status == 0) == (width == right), (attribute, width, status)
            assert status in (0, 7)
    assert getattr(library, f"cublasLt{kind}Destroy")(created) == 0


def test_layouts_are_made_without_a_gpu(library):
    layout = ctypes.c_void_p()
    u64, i64 = ctypes.c_uint64, ctypes.c_int64
    assert library.cublasLtMatrixLayoutCreate(
        ctypes.byref(layout), 33, u64(256), u64(128), i64(256)
    ) == 0  # fmt: skip
    assert library.cublasLtMatrixLayoutDestroy(layout) == 0


def test_the_real_library_loads_and_says_why_it_cannot_plan_without_a_gpu():
    planner = lt.Planner(real_library())
    assert planner.library["unavailable"] == ""
    assert 130000 <= planner.library["version"] < 140000
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("needs a machine without a GPU")
    reason = refusals_of(planner)
    assert reason == "cublasLtCreate CUBLAS_STATUS_NOT_INITIALIZED (m=256, n=256, k=256)"


def test_every_symbol_the_real_library_must_have_the_double_has():
    source = (fake_cublaslt.SOURCE.parents[2] / "csrc" / "cublaslt" / "library.h").read_text()
    symbols = [*re.findall(r"X\((cublasLt\w+)\)", source), "cublasLtGetVersion"]
    assert len(symbols) > 15
    for library in (ctypes.CDLL(fake_cublaslt.Fake().path), ctypes.CDLL(real_library())):
        assert [symbol for symbol in symbols if not hasattr(library, symbol)] == []
