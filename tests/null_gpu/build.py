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
LIBRARIES = ("c10_cuda", "torch_cuda", "torch_python", "torch_cuda_linalg")  # of torch
# Not in torch's tables: what Triton's driver looks up.
TRITON = (
    *("cuLaunchKernelEx", "cuModuleUnload", "cuFuncSetAttribute", "cuMemsetD32Async"),
    *("cuCtxSetCurrent", "cuCtxPushCurrent_v2", "cuCtxSynchronize", "cuCtxSetLimit"),
    "cuDevicePrimaryCtxRelease_v2",
)


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
    files = [torch / f"lib{name}.so" for name in LIBRARIES]
    names = set().union(*(undefined(file) for file in files if file.exists()))
    runtime = {name for name in names if re.match("(cuda|cublas|cublasLt|cufft|nccl)[A-Z]", name)}
    # torch looks all functions of these two up, although it calls few of them.
    names = undefined(torch / "libcaffe2_nvrtc.so")
    strings = re.findall(rb"\0((?:cu|nvml)[A-Z]\w+)(?=\0)", (torch / "libc10_cuda.so").read_bytes())
    names |= {name.decode() for name in strings}
    nvml = {name for name in names if name.startswith("nvml")}
    driver = {name for name in names if re.match("cu[A-Z]", name)} | set(TRITON)
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
