"""Program: read a pickled array of token lists in a separate process.

Arguments: a `.npy` or `.npz`, keys in order of preference, and a folder for the outputs `ids`
(int64, all lists joined) and `lengths` (int64). A pickle can run any code; the separate process
protects only the caller's memory.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np


def main(arguments: list[str]) -> int:
    """Run the program; return its exit status."""
    source, keys, folder = Path(arguments[0]), arguments[1].split(","), Path(arguments[2])
    loaded: Any = np.load(source, allow_pickle=True)
    if not isinstance(loaded, np.ndarray):
        key = next((key for key in keys if key in loaded.files), None)
        if key is None:
            print(f"its arrays ({', '.join(loaded.files)}) include none of {', '.join(keys)}")
            return 1
        loaded = loaded[key]
    lengths = []
    with (folder / "ids").open("wb") as file:
        for number, row in enumerate(loaded.reshape(-1)):
            ids = np.asarray(row)
            if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
                print(f"its entry {number} is not a list of integers")
                return 1
            file.write(ids.astype("<i8").tobytes())
            lengths.append(ids.size)
    (folder / "lengths").write_bytes(np.array(lengths, "<i8").tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
