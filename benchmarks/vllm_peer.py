"""vLLM, with its fastest settings for this task, as a peer for `generate.py`: `rollouts.py` defines what is timed."""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import version
from importlib.util import find_spec

from common import sample_without_flashinfer, transformers_config

from rollgraph.model import Architecture

# One process, so that tokens need not cross to another. vLLM reads this when it is imported.
MULTIPROCESSING = os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

sample_without_flashinfer()

from vllm import LLM, SamplingParams  # noqa: E402


class Vllm:
    kinds = ("plain", "logprobs")

    def __init__(self, architecture: Architecture, rows: int, length: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        transformers_config(architecture).save_pretrained(self.folder.name)
        self.llm = LLM(
            model=self.folder.name,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_num_seqs=rows,
            max_model_len=length,
            enable_prefix_caching=True,
            enforce_eager=False,
            gpu_memory_utilization=0.9,
        )
        compilation = self.llm.llm_engine.vllm_config.compilation_config
        self.settings = (
            f"vLLM {version('vllm')}, bf16, random weights, VLLM_ENABLE_V1_MULTIPROCESSING={MULTIPROCESSING}, "
            f"compilation {compilation.mode.name}, CUDA graphs {compilation.cudagraph_mode.name} up to "
            f"{compilation.max_cudagraph_capture_size} tokens, prefix cache on, no tokenizer, flat log-probabilities, "
            f"FlashInfer {'installed' if find_spec('flashinfer') else 'not installed'}, other settings by default"
        )

    def generate(self, prompts: list[list[int]], samples: int, new: int, kind: str) -> int:
        with_logprobs = kind == "logprobs"
        params = SamplingParams(
            n=samples,
            temperature=1.0,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if with_logprobs else None,  # 0: only of the sampled token
            flat_logprobs=with_logprobs,
        )
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
