"""One decoder for the Llama and Qwen family, for training and for generation."""

from rollgraph.model.architecture import Architecture, ArchitectureError, Rope
from rollgraph.model.attention import Keys
from rollgraph.model.decoder import Decoder
from rollgraph.model.hf_weights import ModelFileError, load_model, load_weights, save_model, weight_files
from rollgraph.model.logprobs import token_logprobs

__all__ = [
    "Architecture",
    "ArchitectureError",
    "Decoder",
    "Keys",
    "ModelFileError",
    "Rope",
    "load_model",
    "load_weights",
    "save_model",
    "token_logprobs",
    "weight_files",
]
