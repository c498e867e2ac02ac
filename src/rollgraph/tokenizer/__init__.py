"""Text to ids and back: Hugging Face tokenizer files, chat templates, streams of ids, and Megatron's interface.

Nothing here knows about models or tensors.
"""

from rollgraph.tokenizer.byte_tokenizer import ByteTokenizer, load_tokenizer
from rollgraph.tokenizer.detokenizer import Detokenizer
from rollgraph.tokenizer.files import TokenizerError, TokenizerFiles
from rollgraph.tokenizer.megatron_view import MegatronTokenizerView
from rollgraph.tokenizer.tokenizer import Message, Tokenizer

__all__ = [
    "ByteTokenizer",
    "Detokenizer",
    "MegatronTokenizerView",
    "Message",
    "Tokenizer",
    "TokenizerError",
    "TokenizerFiles",
    "load_tokenizer",
]
