"""check_sycl.py FOLDER: what the CPU device would run and an Intel GPU would not, or not the same way.

Kernels must have no double (Arc GPUs have no 64-bit floating point), and no sub-group size that is taken for granted:
who uses sub-groups asks for their size, or requires 16 by PYDFLASH_SUB_GROUP_OF_16, and then the host asks the device.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

RULES = {
    "a double": re.compile(r"\bdouble\b"),
    # 1.0, 1e-3 or 0x1p-24 without the f behind it.
    "a constant of type double": re.compile(
        r"(?<![\w.])(?:\d+\.\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+|0x[0-9a-f.]+p[+-]?\d+)(?![\w.])", re.I
    ),
    "a macro of type double": re.compile(r"\bM_[A-Z0-9_]+\b|\bDBL_\w+"),
    "an assumed sub-group size": re.compile(
        r"\b(?:lane|local_id|linear_id)\w*(?:\(\d?\))?\s*[%&/]\s*(?:8|15|16|31|32)\b"
    ),
}


def without_comments(text: str) -> str:
    blank = lambda found: re.sub(r"[^\n]", " ", found[0])  # noqa: E731
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', blank, text, flags=re.S)


def findings(folder: Path) -> list[str]:
    found = []
    for path in [*sorted(folder.glob("kernels/*.hpp")), *folder.parent.glob("numeric.h")]:
        text = without_comments(path.read_text())
        for number, line in enumerate(text.splitlines(), 1):
            found += [f"{path}:{number}: {what}: {line.strip()}" for what, rule in RULES.items() if rule.search(line)]
        uses = re.search(r"\bsub_group\b", text)
        if uses and not re.search(r"PYDFLASH_SUB_GROUP_OF_16|get(?:_max)?_local_range\(\)", text):
            found.append(f"{path}: an assumed sub-group size: sub-groups are used, their size is not asked for")
        required = re.findall(r"reqd_sub_group_size\((\d+)\)", text)
        asked = [host for host in folder.glob("*.cpp") if "!device_info(stream).sub_groups_of_16" in host.read_text()]
        found += [f"{path}: sub-groups of {size} are required, the host asks for 16" for size in set(required) - {"16"}]
        if required and not asked:
            found.append(f"{path}: the host does not ask the device for sub-groups of 16")
    return found


if __name__ == "__main__":
    problems = findings(Path(sys.argv[1]))
    print(*problems, sep="\n" if problems else "", end="\n" if problems else "")
    sys.exit(bool(problems))
