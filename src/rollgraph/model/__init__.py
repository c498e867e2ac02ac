"""One decoder for the Llama and Qwen family, used for training, scoring and generation."""

from rollgraph.model.architecture import Architecture
from rollgraph.model.attention import PackedKeys
from rollgraph.model.decoder import Decoder
from rollgraph.model.field_kinds import ArchitectureError
from rollgraph.model.logprobs import token_logprobs
from rollgraph.model.rope import Rope
from rollgraph.model.weights.hf import ModelFileError, load_model, load_weights, save_model, weight_files

__all__ = [
    "Architecture",
    "ArchitectureError",
    "Decoder",
    "ModelFileError",
    "PackedKeys",
    "Rope",
    "load_model",
    "load_weights",
    "save_model",
    "token_logprobs",
    "weight_files",
]
