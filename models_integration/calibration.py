"""TriAttention's calibration of a model: one forward over a text, whose queries are recorded before their rotation."""

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration.architecture import Architecture
