"""The memory of forward and backward: what a pass keeps, and what exists for a moment inside it.

Owns the arithmetic of activations, logits and temporary results, from the shape of a model and a number of tokens. On
CUDA, kernels save little, and memory that one part of a backward frees is used by the next part. Plain PyTorch on a
CPU makes more intermediate results, and its tape keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollgraph.model import Architecture
from rollgraph.model.logprobs import chunk_rows
from rollgraph.model.tensor_group import LARGE_SUM
from rollgraph.model.tiled_attention import TILE

FP32 = 4


@dataclass(frozen=True)
class Pass:
    """A pass over a microbatch: Pass(architecture, tokens=16384, itemsize=2, cuda=True)."""

    architecture: Architecture  # of the rank's part of each layer
    tokens: int
    itemsize: int  # bytes of a weight or an activation
    cuda: bool
    recomputed: int = 0  # layers, from the first one, that keep nothing but their inputs
    parts: bool = False  # attention and MLP are recomputed by themselves, so the norms before them are kept
    whole_step: bool = True  # a graph holds the forward and backward of a whole microbatch
    # For an adapted model: the columns that adapters add to each fused product, by its name. None: all weights learn.
    adapters: Mapping[str, int] | None = field(default=None)
    tensor: int = 1  # ranks that divide each layer

    @property
    def adds_products(self) -> bool:
        """Whether products add the gradients of weights to those in fp32 by themselves; see `graph/direct_sums.py`."""
        return self.cuda and self.itemsize < FP32 and self.whole_step

    # -- what a forward keeps for its backward ------------------------------------------------------

    def kept(self) -> int:
        """What the forward keeps, log-probabilities included and logits excluded."""
        a = self.architecture
        layers = (a.layers - self.recomputed) * self.kept_by_layer() + self.recomputed * self._inputs_of_layer()
        angles = 2 * FP32 * (a.head_dim // 2)  # cos and sin
        numbers = 8 + 8 + FP32  # id, target and normalizer
        return layers + self.tokens * (self._kept_by_norm(a.hidden) + angles + numbers)

    def kept_by_layer(self) -> int:
        """What one layer keeps, if it is not recomputed."""
        a = self.architecture
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        attention = (q + 2 * kv + q) * self.itemsize  # rotated queries and keys, values, and the output
        if self.cuda:
            attention += FP32 * a.heads  # the log-sum-exp of each head
            attention += (q + 2 * kv) * self.itemsize if a.qk_norm else 0  # the projection
        else:
            attention += (q + kv) * self.itemsize  # the rest of the projection, of which the values are a part
            if a.qk_norm:
                attention += FP32 * (a.heads + a.kv_heads) + self._trained((q + kv) * self.itemsize)
        mlp = (3 if self.cuda else 4) * a.mlp * self.itemsize  # gate, up, product; plain PyTorch also silu(gate)
        return self.tokens * (2 * self._kept_by_norm(a.hidden) + attention + mlp + self._kept_by_adapters())

    def _inputs_of_layer(self) -> int:
        if self.parts:
            return self.tokens * 2 * self._kept_by_norm(self.architecture.hidden)
        return self.tokens * 2 * self.architecture.hidden * self.itemsize  # the residual stream and its update

    def _kept_by_norm(self, width: int) -> int:
        """Per token: the input, its scale and the output. Plain PyTorch also keeps what a trained weight multiplies."""
        if self.cuda:
            return width * 2 * self.itemsize + FP32
        return width * (FP32 + self.itemsize) + self._trained(width * self.itemsize) + FP32

    def _trained(self, nbytes: int) -> int:
        """What is kept for the gradients of weights alone."""
        return nbytes if self.adapters is None else 0

    def _kept_by_adapters(self) -> int:
        """Per token: the narrow product of each adapter."""
        return sum((self.adapters or {}).values()) * self.itemsize

    # -- what exists for a moment --------------------------------------------------------------------

    def inside_layer(self) -> int:
        """What is alive at once inside the widest part of a forward, and is not kept."""
        a = self.architecture
        mlp = self.tokens * (2 * a.hidden + 3 * a.mlp + self._columns("gate_up")) * self.itemsize
        if self.cuda:
            return max(mlp, self._summed())
        # Plain PyTorch gathers the keys and values of a tile for each query, and lays them out anew in fp32.
        attention = self.tokens * TILE * a.kv_heads * a.head_dim * 4 * FP32
        return max(mlp, attention, self._summed())

    def _summed(self) -> int:
        """Where ranks add up what each has computed: what they exchange, two sums in fp32, and the stream."""
        if self.tensor == 1:
            return 0
        elements = self.tokens * self.architecture.hidden
        exchanged = self.tensor * self.itemsize + 2 * FP32
        if self.tensor > 2 and elements * self.itemsize >= LARGE_SUM:  # rows for all ranks, those received, the total
            exchanged = 3 * self.itemsize + -(-2 * FP32 // self.tensor)
        return elements * (exchanged + 2 * self.itemsize)

    def _columns(self, product: str) -> int:
        return (self.adapters or {}).get(product, 0)

    def widest(self) -> int:
        """The largest activation: gate and up."""
        return self.tokens * (2 * self.architecture.mlp + self._columns("gate_up")) * self.itemsize

    def backward_of_layer(self) -> int:
        """What is alive at once in the backward of a layer, beside what the forward kept."""
        if not self.cuda:
            return self.inside_layer()
        a = self.architecture
        stream = 2 * a.hidden * self.itemsize
        mlp = self.tokens * (stream + (3 * a.mlp + self._columns("gate_up")) * self.itemsize)
        attention = self.tokens * stream + self._attention_backward()
        recomputed = self.kept_by_layer() if self.recomputed == a.layers else 0
        return max(mlp, attention, self._summed()) + recomputed + self._gradients_of_layer()

    def _attention_backward(self) -> int:
        """Every sequence has gradients of its own for the keys and values of a prompt that it shares."""
        a = self.architecture
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        found = 2 * 2 * self.tokens * kv * FP32
        summed = 2 * self.tokens * kv * self.itemsize
        return found + summed + self.tokens * a.heads * FP32 + 3 * self.tokens * q * self.itemsize

    def _gradients_of_layer(self) -> int:
        """New gradients, before they are added to those in fp32: of the largest weight, or of a recomputed layer."""
        a = self.architecture
        if self.adapters is not None or self.adds_products:
            return 0
        largest = 2 * a.mlp * a.hidden * self.itemsize
        if not self.recomputed:
            return largest
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        return (3 * a.mlp * a.hidden + a.hidden * (2 * q + 2 * kv)) * self.itemsize

    # -- logits --------------------------------------------------------------------------------------

    def logits_of_score(self) -> int:
        """A chunk of logits in fp32; plain PyTorch makes two intermediate results of that size."""
        vocabulary = self.architecture.vocabulary
        return chunk_rows(self.tokens, vocabulary) * vocabulary * FP32 * (1 if self.cuda else 3)

    def logits_of_train(self, whole: bool) -> int:
        """Logits and their gradient, of all tokens or of a chunk, and the gradient of the head."""
        a = self.architecture
        rows = self.tokens if whole else chunk_rows(self.tokens, a.vocabulary)
        logits = rows * a.vocabulary * (FP32 + self.itemsize if self.cuda else 5 * FP32)
        if self.adapters is not None or self.adds_products:
            return logits + self.tokens * a.hidden * self.itemsize
        head = a.vocabulary * a.hidden
        if rows < self.tokens:  # accumulated over chunks in fp32
            return logits + head * FP32
        return logits + (head * self.itemsize if self.cuda else 0)
