"""Where pip wheels put NVRTC: told to the library, which looks there too."""

import functools
import importlib.util
from pathlib import Path

from plait import _plait


def wheel_dirs():
    """Folders of nvidia-cuda-nvrtc wheels of this Python, newest CUDA first."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    names = ("cu13/lib", "cuda_nvrtc/lib")
    return [str(path) for name in names for root in roots if (path := Path(root, name)).is_dir()]


@functools.cache
def use_wheels():
    """Adds them to the places that the library looks in, before anything compiles for a GPU."""
    dirs = wheel_dirs()
    if dirs:
        _plait.add_nvrtc_search_dirs(dirs)
