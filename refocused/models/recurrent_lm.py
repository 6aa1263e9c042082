"""Base classes of the recurrent families for transformers: initialization, head and loss."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from refocused.models.recall import ShortConvolution


class RecurrentConfig(PreTrainedConfig):  # type: ignore[misc]
    """What the shapes of all recurrent families have."""

    vocab_size: int = 50257  # rows of the embedding, V
    hidden_size: int = 768  # D
    num_hidden_layers: int = 6  # blocks, L
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


class RecurrentPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Base class of the body and of the model with its head."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True  # a state cannot be rolled back
    _supports_sdpa = True  # accept the name; there is no attention to choose

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a module; matrices into the residual stream start smaller (GPT-2).

        A memory's keys start equal to its queries (Trockman et al. 2024, Mimetic initialization).
        Matrices are marked `is_residual` or `reads_memory`: transformers passes only modules with
        parameters of their own to this method, which blocks do not have.
        """
        super()._init_weights(module)
        if isinstance(module, ShortConvolution):
            init.copy_(module.weight, module.drawn_taps())
        if getattr(module, "reads_memory", False):
            query, _, *others = torch.as_tensor(module.weight).chunk(4)
            init.copy_(module.weight, torch.cat((query, query, *others)))
        if getattr(module, "is_residual", False):
            init.normal_(module.weight, std=self._residual_deviation)

    @property
    def _residual_deviation(self) -> float:
        deviation: float = self.config.initializer_range
        return deviation / math.sqrt(2 * self.config.num_hidden_layers)


class RecurrentForCausalLM(RecurrentPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A body with a language-model head, as transformers uses it."""

    body_class: type[RecurrentPreTrainedModel]

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
