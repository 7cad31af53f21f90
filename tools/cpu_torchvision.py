"""Let PyPI's torchvision (a CUDA build) import beside a CPU build of torch; `make setup` runs it once.

Qwen-VL's processors import torchvision, whose first import registers fake kernels for `torchvision::nms` and fails
where its own compiled library did not load. This writes a small import hook into site-packages that defines the two
operators first. Nothing is written where torchvision already imports (a matching CPU build, or CUDA).
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

HOOK = '''"""Define torchvision's operators before it is imported beside a CPU torch (written by r1's set-up)."""
import importlib.abc
import sys


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                for op in ("nms", "qnms"):
                    torch.library.define(f"torchvision::{op}", schema)
        return None


sys.meta_path.insert(0, _Finder())
'''


def imports() -> bool:
    return (
        subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False).returncode == 0
    )


def main() -> None:
    if imports():
        return
    site = Path(sysconfig.get_path("purelib"))
    (site / "r1_cpu_torchvision.py").write_text(HOOK)
    # A .pth, since vLLM inspects models in processes of its own, where only site-packages has been read.
    (site / "r1_cpu_torchvision.pth").write_text("import r1_cpu_torchvision\n")
    if not imports():
        sys.exit("torchvision does not import, not even with its operators predefined; reinstall torch and torchvision")


if __name__ == "__main__":
    main()
