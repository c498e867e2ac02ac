"""Weight files: Hugging Face's layout (`hf.py`), and adapter folders of PEFT (`adapter_files.py`)."""
