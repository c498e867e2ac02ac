"""Data from files, Python objects and the Hugging Face Hub, read into rows, prompts and demonstrations."""
