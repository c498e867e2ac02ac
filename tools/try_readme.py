"""Run the README's commands as a newcomer would: on a fresh clone, in a fresh environment, copied from the file.

    python tools/try_readme.py                          all commands: minutes, most of them for `make test`
    python tools/try_readme.py --leave-out 'make test'
    python tools/try_readme.py --python python3.12      another Python

It clones the last commit of this checkout instead of the public repository. All commands run in one shell, as if they
were typed one after the other. It prints the wall time and the processor time of each, and at the end the size of the
environment. The exit code is 0 if every command succeeded.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/rollgraph/rollgraph.git"
SECTIONS = (None, "## From the command line")  # README sections with commands to run; None: before the first heading
BLOCK = re.compile(r"^```\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Sourced, so that a command can change the folder or the PATH of later commands.
MEASURED = r"""
measured() {
    printf '\n$ %s\n' "$1"
    times > "$TIMES.before"; began=$(date +%s)
    eval "$1" || { echo "FAILED: $1"; exit 1; }
    times > "$TIMES.after"
    python3 - "$1" $(( $(date +%s) - began )) "$TIMES.before" "$TIMES.after" >> "$TIMES" <<'END'
import re, sys
command, seconds, *files = sys.argv[1:]
spent = []
for file in files:  # the second line has the time of all programs that the shell has started
    spent.append(sum(60 * int(m) + float(s) for m, s in re.findall(r"(\d+)m([\d.]+)s", open(file).readlines()[1])))
print(f"{int(seconds):5d} s {spent[1] - spent[0]:8.1f} s  {command}")
END
}
"""


def commands_of(readme: str) -> list[str]:
    """Return the commands in the first block of each section, without comments."""
    commands = []
    for section in SECTIONS:
        text = readme if section is None else readme.partition(f"\n{section}\n")[2]
        block = BLOCK.search(text)
        if block is None:
            raise SystemExit(f"the README has no commands in {section or 'its beginning'}")
        commands += [re.sub(r"\s+#.*", "", line) for line in block[1].splitlines()]
    return commands


def without_settings(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a newcomer: without our settings, and outside any virtual environment."""
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "MAKEFLAGS", "MAKELEVEL")
    return {name: value for name, value in environment.items() if name not in ours}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leave-out", action="append", default=[], metavar="COMMAND", help="can be repeated")
    parser.add_argument("--python", default="python3", help="the Python with which `make` sets up its environment")
    options = parser.parse_args()
    commands = commands_of((ROOT / "README.md").read_text(encoding="utf-8"))
    unknown = set(options.leave_out) - set(commands)
    if unknown:
        parser.error(f"no command of the README: {', '.join(unknown)}; they are: {'; '.join(commands)}")
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder, "times")
        script = [MEASURED, f"TIMES={shlex.quote(str(times))}"]
        clone = f"{shlex.quote(str(ROOT))} rollgraph"  # a folder with the name of the repository
        for command in commands:
            if command not in options.leave_out:
                script.append(f"measured {shlex.quote(command.replace(REPOSITORY, clone))}")
        environment = without_settings(dict(os.environ)) | {"PYTHON": options.python}
        code = subprocess.run(["bash", "-c", "\n".join(script)], cwd=folder, env=environment).returncode
        print(f"\n  clock  processor  command\n{times.read_text() if times.exists() else ''}")
        for environment_folder in Path(folder).glob("*/.venv"):
            subprocess.run(["du", "-sh", environment_folder])
    return code


if __name__ == "__main__":
    sys.exit(main())
