"""Run every benchmark of this folder, one after another, each in a process of its own; `make bench` calls this.

Each asks one question and writes one file into benchmarks/results/; packages that are not installed are left out of the
comparison and named. `--quick` runs all of them on the smallest sizes and prints.

    python benchmarks/run.py                 # everything; hours on a small machine, which should do nothing else
    python benchmarks/run.py build train     # some
    python benchmarks/run.py --quick
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMES = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="smallest sizes, once; writes no file")
    arguments, more = parser.parse_known_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"{', '.join(sorted(unknown))}: no such benchmark; there are {', '.join(NAMES)}")
    failed = []
    for name in arguments.names or NAMES:
        print(f"== {name}", file=sys.stderr, flush=True)
        command = [sys.executable, str(HERE / f"bench_{name}.py"), *(["--quick"] if arguments.quick else []), *more]
        failed += [name] if subprocess.run(command, check=False).returncode else []
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
