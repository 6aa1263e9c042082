"""Resonance: a causal language model whose positions meet in damped resonators, O(T log T)."""

from __future__ import annotations

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

from refocused.models.resonance.resonators import ComplexWeight, Resonators, ring_on, silence


class RecurrentState:
    """The states of all layers, with what `generate` of transformers asks a cache for.

    Attributes:
        layers: The state of each layer, whatever it is; None before the first token.
        batch_axis: The axis of those tensors that counts sequences.
        positions: Tokens that each sequence has seen, padding left out, `[B]`; None before.
        length: Tokens seen, padding included.
    """

    is_compileable = False  # `generate` need not try

    def __init__(self, layers: int, *, batch_axis: int) -> None:
        self.layers: list[Tensor | None] = [None] * layers
        self.batch_axis = batch_axis
        self.positions: Tensor | None = None
        self.length = 0

    def advance(self, mask: Tensor) -> Tensor:
        """Move on by some tokens; return their positions `[B, T]` (of padding: any).

        Args:
            mask: `[B, T]`, 1 where there is a token and 0 where there is padding.
        """
        before = 0 if self.positions is None else self.positions[:, None]
        positions = before + mask.long().cumsum(dim=1) - 1
        self.positions = positions[:, -1] + 1
        self.length += mask.shape[1]
        return positions.clamp(min=0)

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the tokens seen."""
        return self.length

    def reorder_cache(self, chosen: Tensor) -> None:
        """Keep the sequences that a beam search goes on with, given by their numbers `[B]`."""
        self.layers = [self._chosen(state, chosen) for state in self.layers]
        if self.positions is not None:
            self.positions = self.positions.index_select(0, chosen.to(self.positions.device))

    def _chosen(self, state: Any, chosen: Tensor) -> Any:
        if state is None:
            return None
        return torch.index_select(state, self.batch_axis, chosen.to(state.device))


INTERFERENCE_RANGE = 0.01  # of the first interference matrix
BATCH_AXIS = 1  # of a resonators' state, which is `[2, B, F, D]`


class ResonanceConfig(PreTrainedConfig):  # type: ignore[misc]
    """The shape of a resonance model."""

    model_type = "resonance"

    vocab_size: int = 50257
    hidden_size: int = 768
    num_hidden_layers: int = 6
    num_resonators: int = 64  # resonators of a block, F
    # inner width of the feed-forward part; None: 4 times `hidden_size`
    intermediate_size: int | None = None
    max_position_embeddings: int = 32768  # learned positions, T_max; later tokens take the last one
    # the longest memory before training, in tokens; None: `max_position_embeddings`. Weights are
    # differences from that spectrum, so it must never change once they are trained.
    spectrum_length: int | None = None
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    # probability at the embedding and before each sum with the residual stream
    dropout: float = 0.0
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.spectrum_length = self.spectrum_length or self.max_position_embeddings
        super().__post_init__(**kwargs)

    @property
    def longest_sequence(self) -> int | None:
        """The most tokens of a sequence: there is no limit."""
        return None

    @property
    def inner_size(self) -> int:
        """Inner width of the feed-forward part."""
        return self.intermediate_size or 4 * self.hidden_size


class ResonanceBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    """Pre-norm block: gated resonators, then a feed-forward part."""

    def __init__(self, config: ResonanceConfig, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.layer = layer
        self.chunk = config.max_position_embeddings
        self.mixing_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        longest = config.spectrum_length or config.max_position_embeddings
        self.resonators = Resonators(width, config.num_resonators, max_length=longest)
        self.gate = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.inner_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.up = nn.Linear(width, config.inner_size)
        self.down = nn.Linear(config.inner_size, width)
        # On the matrices themselves: transformers passes a module of ours to `_init_weights` only
        # if it has parameters of its own, which a block has not.
        self.output.is_residual = self.down.is_residual = True  # type: ignore[assignment]
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, state: RecurrentState | None = None
    ) -> Tensor:
        """Return the residual stream `[B, T, D]` after this block.

        Args:
            hidden: Before it, `[B, T, D]`.
            mask: `[B, T]`, 0 where there is padding, which rings no resonator; None: nowhere.
            state: What came before; it is moved on.
        """
        normed = self.mixing_norm(hidden)
        driving = normed if mask is None else normed * mask[..., None].to(normed.dtype)
        mixed = self.gate(normed).sigmoid() * self._rung(driving, state)
        hidden = hidden + self.dropout(self.output(mixed))
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


class ResonancePreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What both classes share: initialisation, and what transformers wants to know."""

    config_class = ResonanceConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("ResonanceBlock",)
    _is_stateful = True  # a state cannot be taken back by some tokens
    _supports_sdpa = True  # asked for by name everywhere here; there is no attention to choose

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights from N(0, s^2), those into the residual stream with s / sqrt(2 L)."""
        spread = self.config.initializer_range
        if isinstance(module, nn.Linear):
            factor = math.sqrt(2 * self.config.num_hidden_layers)
            is_residual = getattr(module, "is_residual", False)
            init.normal_(module.weight, mean=0.0, std=spread / factor if is_residual else spread)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=spread)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, ComplexWeight):
            init.ones_(module.magnitude)
            init.uniform_(module.phase, -math.pi, math.pi)
        elif isinstance(module, Resonators):
            init.normal_(module.interference, mean=0.0, std=INTERFERENCE_RANGE)
            init.zeros_(module.decay_shift)
            init.zeros_(module.frequency_shift)


class ResonanceModel(ResonancePreTrainedModel):
    """Embeddings, blocks, final norm."""

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

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        self.tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: RecurrentState | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **ignored: Any,
    ) -> BaseModelOutputWithPast:
        """Return the last hidden states.

        Args:
            input_ids: Tokens `[B, T]`, of any length: beyond T_max blocks go chunk by chunk.
            attention_mask: 0 where there is padding; its last T columns count.
            inputs_embeds: `[B, T, D]`, in place of tokens.
            past_key_values: What came before; it is moved on.
            use_cache: Begin a state where there is none.
            output_hidden_states: Return what each block took too; None: as the configuration says.
            ignored: What other families take, such as `position_ids`.
        """
        embedded = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        rows, length, _ = embedded.shape
        state = past_key_values
        if state is None and use_cache:
            state = RecurrentState(len(self.layers), batch_axis=BATCH_AXIS)
        mask = None if attention_mask is None else attention_mask[:, -length:]
        if state is None and mask is None:
            positions = torch.arange(length, device=embedded.device)
        else:
            ones = torch.ones(rows, length, dtype=torch.long, device=embedded.device)
            counter = state or RecurrentState(0, batch_axis=BATCH_AXIS)
            positions = counter.advance(ones if mask is None else mask)
        last = self.config.max_position_embeddings - 1
        hidden = self.dropout(embedded + self.positions(positions.clamp(max=last)))
        wants_all = output_hidden_states or (
            output_hidden_states is None and self.config.output_hidden_states
        )
        taken: list[Tensor] = []
        for block in self.layers:
            taken += [hidden] if wants_all else []  # kept, each takes memory
            hidden = block(hidden, mask, state)
        hidden = self.norm(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=state,
            hidden_states=(*taken, hidden) if wants_all else None,
        )


class ResonanceForCausalLM(ResonancePreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The model with a head that is tied to the token embedding."""

    _tied_weights_keys = {"lm_head.weight": "model.tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ResonanceConfig) -> None:
        super().__init__(config)
        self.model = ResonanceModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` begins a state of its own

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: RecurrentState | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **for_loss: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits, and the loss where there are labels, which are shifted here.

        The arguments are those of `ResonanceModel`, and:

        Args:
            labels: Tokens `[B, T]` themselves, as all of transformers' models take them.
            logits_to_keep: Of how many last tokens, or of which, logits are wanted; 0: of all.
            for_loss: What transformers' loss takes: with `num_items_in_batch`, the number of labels
                of all accumulated passes, the loss is divided by that.
        """
        keeps = self.config.use_cache and not self.training if use_cache is None else use_cache
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=keeps,
            output_hidden_states=output_hidden_states,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=logits.shape[-1], **for_loss
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )
