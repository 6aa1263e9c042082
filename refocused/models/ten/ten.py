"""TEN, temporal eigenstate networks: a causal language model without attention, in O(T)."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.output_capturing import capture_outputs

from refocused.models.recall import CausalAttention, Parts, RecallParts, is_attention, select_parts
from refocused.models.recurrent_lm import RecurrentForCausalLM, RecurrentPreTrainedModel
from refocused.models.sequence_parallel import SequenceGroup
from refocused.models.ten.cells import ScaleState, TenCells, TenMixer


class TenConfig(PreTrainedConfig):  # type: ignore[misc]
    """The shape of a TEN model."""

    model_type = "ten"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 50257  # rows of the embedding, V
    hidden_size: int = 512  # D
    num_hidden_layers: int = 4  # blocks, L
    num_eigenstates: int = 64  # modes of a cell, K; a block has two cells per scale
    intermediate_size: int = 0  # of the feed-forward part, F; 0: 4 D
    max_position_embeddings: int = 512  # training length; the limit with learned positions
    # Longest initial horizon in tokens; None: `max_position_embeddings`. Weights are relative to
    # this initial spectrum, so it must not change after training.
    spectrum_length: int | None = None
    learned_positions: bool = True  # add position embeddings; without them any length is allowed
    scales: list[int] | None = None  # tokens averaged before each of a block's recurrences
    chunk_size: int = 64  # tokens of a chunk of the scan; does not affect the result
    # Recall of content (`models/recall.py`); 0: none.
    convolution_width: int = 0  # taps of a causal convolution before each mixer
    memory_heads: int = 0  # of a matrix-valued memory beside each mixer
    attention_every: int = 0  # every so many-th block has attention instead of a mixer
    attention_heads: int = 0  # of those blocks; 0: D / 64
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    hidden_dropout: float = 0.0
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.intermediate_size = self.intermediate_size or 4 * self.hidden_size
        self.scales = list(self.scales or [1])
        self.spectrum_length = self.spectrum_length or self.max_position_embeddings
        self.attention_heads = self.attention_heads or max(1, self.hidden_size // 64)
        super().__post_init__(**kwargs)

    @property
    def takes_padding(self) -> bool:
        """False: the recurrence cannot skip padding."""
        return False

    @property
    def longest_sequence(self) -> int | None:
        """The maximal length of a sequence; None: no limit."""
        return self.max_position_embeddings if self.learned_positions else None


class TenState:
    """The state of generation, with the interface of a transformers cache.

    Its size is constant, but for the keys and values of blocks of attention.
    """

    is_compileable = False  # read by `generate`

    def __init__(self, config: TenConfig) -> None:
        self.seen_tokens = 0
        self.blocks: list[list[ScaleState | None]] = [
            [None] * len(config.scales or [1]) for _ in range(config.num_hidden_layers)
        ]
        self.parts: list[Parts] = [{} for _ in self.blocks]

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""
        return self.seen_tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select sequences by index `[B]`, for beam search."""
        for scales in self.blocks:
            for state in scales:
                if state is not None:
                    state.select(beam_idx)
        for parts in self.parts:
            select_parts(parts, beam_idx)


class TenBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    """Pre-norm block: eigenstates or attention, then a feed-forward part."""

    def __init__(self, config: TenConfig, layer: int) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.mixer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.mixer: TenMixer | CausalAttention
        if is_attention(config, layer):
            self.mixer = CausalAttention(width, heads=config.attention_heads)
        else:
            self.recall = RecallParts(config)
            self.mixer = TenMixer(
                width,
                eigenstates=config.num_eigenstates,
                longest=config.spectrum_length or config.max_position_embeddings,
                chunk=config.chunk_size,
                scales=config.scales or [1],
            )
        self.ffn_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.ffn_in = nn.Linear(width, inner)
        self.ffn_out = nn.Linear(inner, width)
        self.ffn_out.is_residual = True  # type: ignore[assignment]
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden: Tensor,
        states: list[ScaleState | None] | None = None,
        parts: Parts | None = None,
        sequence_group: SequenceGroup | None = None,
    ) -> Tensor:
        """Return the residual stream `[B, T, D]` after the block; update both states in place."""
        normed = self.mixer_norm(hidden)
        if isinstance(self.mixer, CausalAttention):
            mixed = self.mixer(normed, parts, group=sequence_group)
        else:
            normed = self.recall.before(normed, parts, sequence_group)
            mixed = self.mixer(normed, states, sequence_group)
            mixed = self.recall.beside(mixed, normed, parts, group=sequence_group)
        hidden = hidden + self.dropout(mixed)
        inner = nn.functional.gelu(self.ffn_in(self.ffn_norm(hidden)))
        added: Tensor = hidden + self.dropout(self.ffn_out(inner))
        return added


class TenPreTrainedModel(RecurrentPreTrainedModel):
    """Base class of the body and of the model with its head."""

    config_class = TenConfig
    _no_split_modules = ("TenBlock",)
    _can_record_outputs = {"hidden_states": TenBlock}  # noqa: RUF012 - as transformers does

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, TenCells):
            init.normal_(module.in_weight, std=self.config.initializer_range)
            init.normal_(module.mixing, std=self.config.initializer_range)
            init.normal_(module.out_weight, std=self._residual_deviation)
            init.zeros_(module.rate_shift)
            init.zeros_(module.frequency_shift)


class TenModel(TenPreTrainedModel):
    """Embeddings, blocks, final norm."""

    def __init__(self, config: TenConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.learned_positions:
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(
            TenBlock(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TenState | None = None,
        use_cache: bool | None = None,
        sequence_group: SequenceGroup | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Return the last hidden states `[B, T, D]`, and the state if there is one.

        Args:
            input_ids: Tokens `[B, T]`.
            inputs_embeds: `[B, T, D]`, instead of tokens.
            position_ids: For learned positions; default: continue after the state. They do not
                affect the recurrence.
            attention_mask: Must not mask tokens.
            past_key_values: State of the tokens before; updated in place.
            use_cache: Create a state if none is given.
            sequence_group: Ranks that have slices of the tokens, in training.

        Raises:
            ValueError: Padding, or a sequence beyond the learned positions.
        """
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        state = past_key_values
        if state is None:
            if attention_mask is not None and not bool(attention_mask.all()):
                raise ValueError(
                    "The attention mask hides tokens, which a recurrence cannot skip. Use "
                    "sequences of equal length, without padding."
                )
            state = TenState(self.config) if use_cache else None
        if self.config.learned_positions:
            if position_ids is None:
                first = 0 if state is None else state.seen_tokens
                end = first + hidden.shape[1]
                if end > self.config.max_position_embeddings:
                    raise ValueError(
                        f"Token {end} has no learned position: this model supports sequences of at "
                        f"most {self.config.max_position_embeddings} tokens."
                    )
                position_ids = torch.arange(first, end, device=hidden.device).unsqueeze(0)
            hidden = hidden + self.embed_positions(position_ids)
        hidden = self.dropout(hidden)
        group = {} if sequence_group is None else {"sequence_group": sequence_group}
        for place, block in enumerate(self.layers):
            kept = () if state is None else (state.blocks[place], state.parts[place])
            hidden = block(hidden, *kept, **group)
        if state is not None:
            state.seen_tokens += hidden.shape[1]
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=state)


class TenForCausalLM(RecurrentForCausalLM, TenPreTrainedModel):
    """The model with a language-model head."""

    body_class = TenModel
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - see above
