"""GGUF packages: which of llama.cpp's architectures expresses a model, and its tokenizer."""
