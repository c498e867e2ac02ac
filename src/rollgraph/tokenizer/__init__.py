"""Text to ids and back: Hugging Face tokenizer files, chat templates, and decoding of streams.

Knows nothing about models or tensors.
"""

from rollgraph.tokenizer.detokenizer import Detokenizer
from rollgraph.tokenizer.files import TokenizerError, TokenizerFiles
from rollgraph.tokenizer.tokenizer import ByteTokenizer, Message, Tokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "Detokenizer",
    "Message",
    "Tokenizer",
    "TokenizerError",
    "TokenizerFiles",
    "load_tokenizer",
]
