"""Define torchvision's compiled operators by name just before torchvision is imported.

Its wheel is built for CUDA, so here its library doesn't load and the import fails on names that are
missing. Nothing calls them for a text model.
"""

import importlib.abc
import sys

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    library = None  # keeps the definitions alive

    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            _BeforeTorchvision.library = torch.library.Library("torchvision", "DEF")
            for operator in _OPERATORS:
                self.library.define(operator)


sys.meta_path.insert(0, _BeforeTorchvision())
