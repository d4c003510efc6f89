"""Lets PyPI's torchvision, a CUDA build, be imported beside a torch without CUDA.

Its extension does not load there, and it registers a fake of two operators that nobody defined
then. Their schemas are enough for all of torchvision that is Python. Python imports this module at
its start (rftmega_torchvision.pth), in every process; nothing is done until torchvision is wanted.
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys

OPERATORS = ("nms", "qnms")  # that have a fake; the others look whether the extension is there
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """BeforeTorchvision finds torchvision as Python does, and defines the operators first where the
    build found is one for CUDA.
    """

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        with contextlib.suppress(ValueError):  # another thread was first
            sys.meta_path.remove(self)
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if found is not None and is_for_cuda(found.submodule_search_locations):
            define()
        return found


def is_for_cuda(folders):
    """Returns whether torchvision's own version is like 0.28.0+cu130; a build that fits a torch
    without CUDA brings the operators itself, and must not meet them.
    """
    for folder in folders or ():
        with contextlib.suppress(OSError), open(f"{folder}/version.py", encoding="utf-8") as file:
            return "+cu" in file.read()
    return False


def define():
    import torch

    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        with contextlib.suppress(RuntimeError):  # somebody has defined it
            library.define(name + SCHEMA)
    define.library = library  # which forgets its operators with its end


sys.meta_path.insert(0, BeforeTorchvision())
