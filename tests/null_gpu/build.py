"""Build the null GPU for an environment with torch's CUDA build: build.py SITE_PACKAGES FOLDER.

Writes libnullgpu.so, which LD_PRELOAD loads before CUDA's runtime, and libcuda.so.1, the driver;
beside them the metadata of refocused, for an environment in which it is not installed.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARIES = "libc10_cuda.so libtorch_cuda.so libtorch_python.so libtorch_cuda_linalg.so".split()
# Tables of the driver's functions: all must be there, although few are called.
LOOKED_UP = "libcaffe2_nvrtc.so libc10_cuda.so".split()


def undefined(library: Path) -> set[str]:
    """Return the names that a library expects from others."""
    command = ["nm", "-D", "--undefined-only", library]
    lines = subprocess.check_output(command, text=True).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


def build(sources: str, names: Iterable[str], *, library: Path, flags: list[str]) -> None:
    """Compile sources with an empty function for each name that they lack."""
    text = "".join((HERE / source).read_text() for source in sources.split())
    defined = set(re.findall(r"^\w[\w \*]*?\b(\w+)\(", text, re.MULTILINE))
    missing = sorted(set(names) - defined)
    calls = 'note("{0}"); ' if "note(const" in text else ""
    empty = "".join(f"int {name}() {{ {calls.format(name)}return 0; }}\n" for name in missing)
    whole = library.with_suffix(".c")
    whole.write_text(text + empty)
    command = ["gcc", "-O1", "-fPIC", "-shared", "-w", f"-I{HERE / 'include'}", *flags]
    subprocess.run([*command, "-o", library, whole, "-ldl", "-lpthread"], check=True)


def main() -> None:
    """Build both libraries."""
    packages, folder = Path(sys.argv[1]), Path(sys.argv[2])
    torch = packages / "torch" / "lib"
    runtime = set().union(*(undefined(torch / name) for name in LIBRARIES if (torch / name).exists()))
    runtime = {name for name in runtime if re.match("(cuda|cublas|cublasLt|cufft|nccl)[A-Z]", name)}
    driver = {name for name in undefined(torch / LOOKED_UP[0]) if re.match("cu[A-Z]", name)}
    strings = re.findall(rb"\0((?:cu|nvml)[A-Z]\w+)(?=\0)", (torch / LOOKED_UP[1]).read_bytes())
    driver |= {name.decode() for name in strings}
    nvml = {name for name in driver if name.startswith("nvml")}
    driver |= set(
        "cuLaunchKernelEx cuCtxSetCurrent cuCtxPushCurrent_v2 cuCtxSynchronize cuCtxSetLimit "
        "cuDevicePrimaryCtxRelease_v2 cuModuleUnload cuFuncSetAttribute cuMemsetD32Async".split()
    )
    driver -= nvml
    include = ["-I" + str(packages / "nvidia" / "cu13" / "include")]
    build("runtime.c nccl.c", runtime, library=folder / "libnullgpu.so", flags=include)
    for source, names, library in (
        ("driver.c", driver, "libcuda.so.1"),
        ("nvml.c", nvml, "libnvidia-ml.so.1"),
    ):
        soname = [f"-Wl,-soname,{library}"]
        build(source, names, library=folder / library, flags=soname)
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    needs = "".join(f"Requires-Dist: {need}\n" for need in project["dependencies"])
    metadata = folder / "refocused-0.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: refocused\nVersion: 0\n{needs}")


if __name__ == "__main__":
    main()
