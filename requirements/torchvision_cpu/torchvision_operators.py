"""Lets PyPI's torchvision, a CUDA build, be imported beside a torch without CUDA.

Its extension does not load there, and it registers a fake of two operators that nobody defined
then. Their schemas are enough for all of torchvision that is Python. Python imports this module at
its start (rftmega_torchvision.pth), in every process; nothing is done until torchvision is wanted.
"""

import contextlib
import importlib.abc
import sys

OPERATORS = ("nms", "qnms")  # that have a fake; the others look whether the extension is there
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """BeforeTorchvision finds nothing, and defines the operators as soon as torchvision is looked
    for.
    """

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            define()
        return


def define():
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        with contextlib.suppress(RuntimeError):  # a torchvision that fits this torch has defined it
            library.define(name + SCHEMA)
    define.library = library  # which forgets its operators with its end


sys.meta_path.insert(0, BeforeTorchvision())
