"""Scores of H2O and TOVA on the device of the keys, with the names and arguments of the reference."""

from torch import Tensor

from accelerated.torch_device.attention import received as attention_received
from accelerated.torch_device.device import on_device
from spec.policy import LayerView

__all__ = ["h2o_score", "tova_score"]


def h2o_score(view: LayerView, received: object = None) -> Tensor:
    """Implements: PO-H2O-DESCRIBED"""
    return attention_received(on_device(view.q), on_device(view.k), view.scaling, view.softcap, view.sinks)


def tova_score(view: LayerView, received: object = None) -> Tensor:
    """Implements: PO-TOVA"""
    q = on_device(view.q)
    last = attention_received(q[:, q.shape[1] - 1 :], on_device(view.k), view.scaling, view.softcap, view.sinks)
    return last.sum(dim=0, keepdim=True) / len(q)
