"""One decoder for the Llama and Qwen family, used for training, scoring and generation."""

from rollgraph.model.architecture import Architecture
from rollgraph.model.attention import Keys
from rollgraph.model.config_fields import ArchitectureError
from rollgraph.model.decoder import Decoder
from rollgraph.model.hf_saving import save_model
from rollgraph.model.hf_weights import ModelFileError, load_model, load_weights, weight_files
from rollgraph.model.logprobs import token_logprobs
from rollgraph.model.rope import Rope

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
