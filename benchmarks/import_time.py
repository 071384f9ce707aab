"""What `import patchbayes` adds to `import torch`: both in fresh processes, in turn; the median of the differences."""

import statistics
import subprocess
import sys

from records import write_record

CODE = "import time; import torch; began = time.perf_counter(); import patchbayes; print(time.perf_counter() - began)"


def main() -> None:
    added = [
        float(subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True).stdout)
        for _ in range(9)
    ]
    low, middle, high = statistics.quantiles(added, n=4)
    print(f"import patchbayes adds {middle:.3f} s to import torch (quartiles {low:.3f}-{high:.3f}, 9 processes)")
    print("written:", write_record("import_time", {"added_seconds": middle, "quartiles": [low, high], "repeats": 9}))


if __name__ == "__main__":
    main()
