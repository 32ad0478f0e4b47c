"""Writes the ops as a repository that Hugging Face's library `kernels` loads: `python publish/hub_kernels.py FOLDER`.

The folder gets a card and, in `build`, the variants `torch-cpu` and `torch-cuda`: copies of `fb_kernels` without what
tests and times it. There, imports are relative, and the operators' namespace is named for their sources, so that
several versions can be loaded at once. The compiled kernels of `csrc/` are not in it: ops are Triton kernels on a GPU
and plain PyTorch on a CPU.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "fb_kernels"
BACKENDS: dict[str, dict[str, object]] = {
    "cpu": {"type": "cpu"},
    "cuda": {"type": "cuda", "archs": ["8.0+PTX"]},  # Triton compiles for what is there, from Ampere on
}
LEFT_OUT = {"bench.py", "calls.py", "env.py", "naive.py", "self_check.py", "testing.py", "timing.py"}
IMPORT = re.compile(r"^( *from )fb_kernels(?:\.([\w.]+))? import ", re.MULTILINE)
CARD = """---
library_name: kernels
license: apache-2.0
tags: [kernels]
---

# Ops of FutureBridge

Log-probs without logits, attention over shared prefixes, entropy with top-k and what a decode step needs, as
`torch.library` operators with gradients. Triton kernels for NVIDIA GPUs from Ampere on, plain PyTorch on CPUs; Python
3.11, torch 2.11 and `kernels` 0.17 or newer. The package `futurebridge` also has compiled kernels, for CPUs and for
decode steps.

```python
from kernels import get_kernel

ops = get_kernel("OWNER/futurebridge", version=0, trust_remote_code=True)
ops.linear_logprob(hidden, weight, target)
```
"""


def write(folder: Path) -> None:
    """Write card, sources and metadata, in place of what `folder` held before."""
    paths = [path for path in sorted(SOURCE.rglob("*.py")) if path.name not in LEFT_OUT]
    paths += sorted(SOURCE.glob("tuned/*.json"))
    files = {}
    for path in paths:
        relative = path.relative_to(SOURCE)
        package = "." * len(relative.parts)
        files[relative.as_posix()] = IMPORT.sub(rf"\1{package}\2 import ", path.read_text(encoding="utf-8")).encode()
    digests = {name: sha256(content).digest() for name, content in files.items()}
    shutil.rmtree(folder / "build", ignore_errors=True)
    for kind, backend in BACKENDS.items():
        metadata = {
            "name": "futurebridge",
            "id": f"_futurebridge_{kind}_{sha256(b''.join(digests.values())).hexdigest()[:10]}",
            "version": 0,  # by the rules of the hub, kernels that may still change
            "license": "Apache-2.0",
            "kernels-minver": "0.17.0",
            "python-depends": [],
            "backend": backend,
            "digest": {
                "algorithm": "sha256",
                "files": {name: b64encode(digest).decode() for name, digest in digests.items()},
            },
        }
        for name, content in (files | {"metadata.json": json.dumps(metadata, indent=2).encode() + b"\n"}).items():
            target = folder / "build" / f"torch-{kind}" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    (folder / "README.md").write_text(CARD, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
