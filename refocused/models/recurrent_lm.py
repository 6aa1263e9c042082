"""What the recurrent families share: configuration, state, block, body, head and loss."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from refocused.models.recall import CausalAttention, Memory, Parts, ShortConvolution
from refocused.models.sequence_parallel import SequenceGroup


class RecurrentConfig(PreTrainedConfig):  # type: ignore[misc]
    """What the shapes of all recurrent families have."""

    vocab_size: int = 50257  # rows of the embedding, V
    hidden_size: int = 768  # D
    num_hidden_layers: int = 6  # blocks, L
    intermediate_size: int | None = None  # of the feed-forward part; None: 4 D
    max_position_embeddings: int = 32768
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
    def residual_deviation(self) -> float:
        """The standard deviation of new matrices into the residual stream."""
        return self.initializer_range / math.sqrt(2 * self.num_hidden_layers)


class RecurrentState:
    """What the blocks keep of the tokens so far, with the interface of a transformers cache.

    Attributes:
        parts: By block and name, with sequences first. Their size is constant, but for the keys and
            values of attention.
        positions: Tokens of each sequence, without padding, `[B]`; None before the first.
        length: Tokens including padding.
    """

    is_compileable = False  # read by `generate`

    def __init__(self, layers: int) -> None:
        self.parts: list[Parts] = [{} for _ in range(layers)]
        self.positions: Tensor | None = None
        self.length = 0

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of tokens, including padding."""
        return self.length

    def reorder_cache(self, chosen: Tensor) -> None:
        """Select sequences by index `[B]`, for beam search."""
        for parts in self.parts:
            parts.update({name: held.index_select(0, chosen) for name, held in parts.items()})
        if self.positions is not None:
            self.positions = self.positions.index_select(0, chosen)


class RecurrentBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    """Pre-norm block: the family's mixer with recall, or attention; then a feed-forward part."""

    def __init__(self, config: Any, layer: int, mixer_class: type[nn.Module]) -> None:
        super().__init__()
        width, every = config.hidden_size, config.attention_every
        inner = config.intermediate_size or 4 * width
        self.mixer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.convolution = self.memory = None
        if every and (layer + 1) % every == 0:
            self.mixer: nn.Module = CausalAttention(config)
        else:
            if config.convolution_width:
                self.convolution = ShortConvolution(config)
            if config.memory_heads:
                self.memory = Memory(config)
            self.mixer = mixer_class(config)
        self.ffn_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.ffn_in = nn.Linear(width, inner)
        self.ffn_out = nn.Linear(inner, width)
        self.ffn_out.is_residual = True  # type: ignore[assignment]
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        parts: Parts | None = None,
        group: SequenceGroup | None = None,
    ) -> Tensor:
        """Return the residual stream `[B, T, D]` after this block.

        Args:
            hidden: Before it, `[B, T, D]`.
            mask: `[B, T]`, 0 for padding, which no part reads; None: no padding.
            parts: Of the tokens before; updated in place.
            group: Ranks that have slices of the tokens.
        """
        inputs = self.mixer_norm(hidden)
        if isinstance(self.mixer, CausalAttention):
            mixed = self.mixer(inputs, parts, mask, group)
        else:
            real = None if mask is None else mask[..., None].to(inputs.dtype)
            inputs = inputs if real is None else inputs * real
            if self.convolution is not None:
                inputs = self.convolution(inputs, parts, group)
                inputs = inputs if real is None else inputs * real
            mixed = self.mixer(inputs, parts, group)
            if self.memory is not None:
                mixed = mixed + self.memory(inputs, parts, mask, group)
        hidden = hidden + self.dropout(mixed)
        inner = F.gelu(self.ffn_in(self.ffn_norm(hidden)))
        outputs: Tensor = hidden + self.dropout(self.ffn_out(inner))
        return outputs


class RecurrentPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Base class of the body and of the model with its head."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("RecurrentBlock",)
    _can_record_outputs = {"hidden_states": RecurrentBlock}  # noqa: RUF012 - as transformers does
    _is_stateful = True  # a state cannot be rolled back
    _supports_sdpa = True  # accept the name; there is no attention to choose

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a module; matrices into the residual stream start smaller (GPT-2).

        A memory's keys start equal to its queries (Trockman et al. 2024, Mimetic initialization).
        Matrices are marked `is_residual` or `reads_memory`: transformers passes only modules with
        parameters of their own to this method, which blocks do not have. Of these, our own classes
        have a method `initialize`.
        """
        super()._init_weights(module)
        if hasattr(module, "initialize"):
            module.initialize(self.config)  # type: ignore[operator]
        if getattr(module, "reads_memory", False):
            query, _, *others = torch.as_tensor(module.weight).chunk(4)
            init.copy_(module.weight, torch.cat((query, query, *others)))
        if getattr(module, "is_residual", False):
            init.normal_(module.weight, std=self.config.residual_deviation)


class RecurrentModel(RecurrentPreTrainedModel):
    """Embeddings, blocks, final norm."""

    mixer_class: type[nn.Module]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        if config.learned_positions:
            self.embed_positions = nn.Embedding(config.max_position_embeddings, width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            RecurrentBlock(config, layer, self.mixer_class)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.post_init()

    def add_positions(
        self,
        embedded: Tensor,
        mask: Tensor | None,
        state: RecurrentState | None,
        positions: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the embedded tokens `[B, T, D]` with their positions, and the blocks' mask."""
        raise NotImplementedError

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: RecurrentState | None = None,
        use_cache: bool | None = None,
        sequence_group: SequenceGroup | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Return the last hidden states `[B, T, D]`, and the state if there is one.

        Args:
            input_ids: Tokens `[B, T]`.
            attention_mask: 0 for padding; the last T columns are used.
            inputs_embeds: `[B, T, D]`, instead of tokens.
            position_ids: Of the learned positions; default: continue after the state.
            past_key_values: State of the tokens before; updated in place.
            use_cache: Create a state if none is given.
            sequence_group: Ranks that have slices of the tokens, in training.
        """
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        length, state = embedded.shape[1], past_key_values
        mask = None if attention_mask is None else attention_mask[:, -length:]
        if state is None and use_cache:
            state = RecurrentState(len(self.layers))
        hidden, mask = self.add_positions(embedded, mask, state, position_ids)
        hidden = self.dropout(hidden)
        for layer, block in enumerate(self.layers):
            parts = None if state is None else state.parts[layer]
            hidden = block(hidden, mask, parts, sequence_group)
        if state is not None:
            state.length += length
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=state)


class RecurrentForCausalLM(RecurrentPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A body with a language-model head, as transformers uses it."""

    body_class: type[RecurrentModel]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - see above

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.body_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the body creates its own state

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **for_loss: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits `[B, T, V]`, and the loss if labels are given.

        Takes the arguments of the body, and:

        Args:
            labels: Ids `[B, T]` of the same tokens, shifted here as everywhere in transformers;
                -100 is not counted.
            logits_to_keep: Compute only that many last logits, or those at the given positions; 0:
                all.
            for_loss: Arguments of transformers' loss, such as `num_items_in_batch`.
        """
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **for_loss)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )
