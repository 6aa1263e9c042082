"""Resonance: a causal language model that mixes positions by damped resonators, in O(T log T)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.output_capturing import capture_outputs

from refocused.models.recall import CausalAttention, Parts, RecallParts, is_attention, select_parts
from refocused.models.recurrent_lm import RecurrentForCausalLM, RecurrentPreTrainedModel
from refocused.models.resonance.resonators import ComplexWeight, Resonators, ring_on, silence

INTERFERENCE_RANGE = 0.01  # standard deviation of the initial interference matrix


class RecurrentState:
    """The states of all layers, with the interface of a transformers cache.

    Attributes:
        layers: The state of each layer, `[2, B, F, D]`; None before the first token.
        parts: What each layer's convolution, memory or attention keeps.
        positions: Tokens of each sequence, without padding, `[B]`; None before the first.
        length: Tokens including padding.
    """

    is_compileable = False  # read by `generate`

    def __init__(self, layers: int) -> None:
        self.layers: list[Tensor | None] = [None] * layers
        self.parts: list[Parts] = [{} for _ in range(layers)]
        self.positions: Tensor | None = None
        self.length = 0

    def advance(self, mask: Tensor) -> Tensor:
        """Count the tokens of `mask` `[B, T]` (0: padding); return their positions `[B, T]`."""
        before = 0 if self.positions is None else self.positions[:, None]
        positions = before + mask.long().cumsum(dim=1) - 1
        self.positions = positions[:, -1] + 1
        self.length += mask.shape[1]
        return positions.clamp(min=0)

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of tokens, including padding."""
        return self.length

    def reorder_cache(self, chosen: Tensor) -> None:
        """Select sequences by index `[B]`, for beam search."""
        self.layers = [None if z is None else z.index_select(1, chosen) for z in self.layers]
        for parts in self.parts:
            select_parts(parts, chosen)
        if self.positions is not None:
            self.positions = self.positions.index_select(0, chosen)


class ResonanceConfig(PreTrainedConfig):  # type: ignore[misc]
    """The shape of a resonance model."""

    model_type = "resonance"

    vocab_size: int = 50257
    hidden_size: int = 768
    num_hidden_layers: int = 6
    num_resonators: int = 64  # of a block, F
    intermediate_size: int | None = None  # of the feed-forward part; None: 4 times `hidden_size`
    max_position_embeddings: int = 32768  # learned positions, T_max; later tokens use the last one
    # Longest initial memory in tokens; None: `max_position_embeddings`. Weights are relative to
    # this initial spectrum, so it must not change after training.
    spectrum_length: int | None = None
    # Recall of content (`models/recall.py`); 0: none.
    convolution_width: int = 0  # taps of a causal convolution before each mixer
    memory_heads: int = 0  # of a matrix-valued memory beside each mixer
    attention_every: int = 0  # every so many-th block has attention instead of a mixer
    attention_heads: int = 0  # of those blocks; 0: D / 64
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    dropout: float = 0.0  # at the embedding and before each residual sum
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.spectrum_length = self.spectrum_length or self.max_position_embeddings
        self.attention_heads = self.attention_heads or max(1, self.hidden_size // 64)
        super().__post_init__(**kwargs)

    @property
    def longest_sequence(self) -> int | None:
        """None: sequences have no maximal length."""
        return None

    @property
    def inner_size(self) -> int:
        """Inner width of the feed-forward part."""
        return self.intermediate_size or 4 * self.hidden_size


class ResonanceBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    """Pre-norm block: gated resonators or attention, then a feed-forward part."""

    def __init__(self, config: ResonanceConfig, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.layer = layer
        self.chunk = config.max_position_embeddings
        self.mixing_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.attention: CausalAttention | None = None
        if is_attention(config, layer):
            self.attention = CausalAttention(width, heads=config.attention_heads)
        else:
            self.recall = RecallParts(config)
            longest = config.spectrum_length or config.max_position_embeddings
            self.resonators = Resonators(width, config.num_resonators, max_length=longest)
            self.gate = nn.Linear(width, width)
            self.output = nn.Linear(width, width)
            self.output.is_residual = True  # type: ignore[assignment]
        self.inner_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.up = nn.Linear(width, config.inner_size)
        self.down = nn.Linear(config.inner_size, width)
        self.down.is_residual = True  # type: ignore[assignment]
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, state: RecurrentState | None = None
    ) -> Tensor:
        """Return the residual stream `[B, T, D]` after this block.

        Args:
            hidden: Before it, `[B, T, D]`.
            mask: `[B, T]`, 0 for padding, which does not drive the resonators; None: no padding.
            state: Of the tokens before; updated in place.
        """
        normed = self.mixing_norm(hidden)
        parts = None if state is None else state.parts[self.layer]
        if self.attention is not None:
            mixed = self.attention(normed, parts, mask)
        else:
            real = None if mask is None else mask[..., None].to(normed.dtype)
            normed = self.recall.before(normed if real is None else normed * real, parts)
            driving = normed if real is None else normed * real
            mixed = self.output(self.gate(normed).sigmoid() * self._rung(driving, state))
            mixed = self.recall.beside(mixed, driving, parts, mask)
        hidden = hidden + self.dropout(mixed)
        inner = F.gelu(self.up(self.inner_norm(hidden)))
        outputs: Tensor = hidden + self.dropout(self.down(inner))
        return outputs

    def _rung(self, driving: Tensor, state: RecurrentState | None) -> Tensor:
        if state is None and driving.shape[1] <= self.chunk:
            whole: Tensor = self.resonators(driving)
            return whole
        tuning = self.resonators.tuning(driving.dtype)
        before = None if state is None else state.layers[self.layer]
        before = silence(driving, tuning) if before is None else before
        outputs, after = ring_on(driving, tuning, before, chunk=self.chunk)
        if state is not None:
            state.layers[self.layer] = after
        return outputs


class ResonancePreTrainedModel(RecurrentPreTrainedModel):
    """Base class of the body and of the model with its head."""

    config_class = ResonanceConfig
    _no_split_modules = ("ResonanceBlock",)
    _can_record_outputs = {"hidden_states": ResonanceBlock}  # noqa: RUF012 - as transformers does

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ComplexWeight):
            init.ones_(module.magnitude)
            init.uniform_(module.phase, -math.pi, math.pi)
        elif isinstance(module, Resonators):
            init.normal_(module.interference, std=INTERFERENCE_RANGE)
            init.zeros_(module.decay_shift)
            init.zeros_(module.frequency_shift)


class ResonanceModel(ResonancePreTrainedModel):
    """Embeddings, blocks, final norm."""

    _input_embed_layer = "tokens"

    def __init__(self, config: ResonanceConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.max_position_embeddings, width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            ResonanceBlock(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.post_init()

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: RecurrentState | None = None,
        use_cache: bool | None = None,
        **ignored: Any,
    ) -> BaseModelOutputWithPast:
        """Return the last hidden states.

        Args:
            input_ids: Tokens `[B, T]` of any length; beyond T_max they are computed in chunks.
            attention_mask: 0 for padding; the last T columns are used.
            inputs_embeds: `[B, T, D]`, instead of tokens.
            past_key_values: State of the tokens before; updated in place.
            use_cache: Create a state if none is given.
            ignored: Arguments of other families, such as `position_ids`.
        """
        embedded = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        rows, length, _ = embedded.shape
        state = past_key_values
        if state is None and use_cache:
            state = RecurrentState(len(self.layers))
        mask = None if attention_mask is None else attention_mask[:, -length:]
        if state is None and mask is None:
            positions = torch.arange(length, device=embedded.device)
        else:
            ones = torch.ones(rows, length, dtype=torch.long, device=embedded.device)
            counter = state or RecurrentState(0)
            positions = counter.advance(ones if mask is None else mask)
        last = self.config.max_position_embeddings - 1
        hidden = self.dropout(embedded + self.positions(positions.clamp(max=last)))
        for block in self.layers:
            hidden = block(hidden, mask, state)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=state)


class ResonanceForCausalLM(RecurrentForCausalLM, ResonancePreTrainedModel):
    """The model with a head that is tied to the token embedding."""

    body_class = ResonanceModel
    _tied_weights_keys = {"lm_head.weight": "model.tokens.weight"}  # noqa: RUF012 - see above
