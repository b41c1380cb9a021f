"""Text for language models: tokenizers, corpora, and token shards with the batches of them."""

from .corpus import Document, python_library, text_files
from .shards import TokenLoader, Tokens, write_tokens
from .tokenizers import ByteTokenizer, CharTokenizer, GPT2Tokenizer, Tokenizer, tokenizer_from
