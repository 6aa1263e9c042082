"""What a model here promises: a transformers network of any family whose head returns the loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from refocused.models.attention import document_blocks, document_mask
from refocused.models.head_loss import LossHead, label_scores

LARGEST_LOGIT_TERM = 1.0  # nats; beyond it the weights are drawn too wide to train from
DEFAULT_INITIALIZER_RANGE = 0.02  # of both families in transformers
NETWORK_PREFIX = "network."  # of the parameters of `CausalLM`, before transformers' own names


class CausalLM(nn.Module):
    """A causal language model: `forward` gives the loss, `logits` the predictions.

    Attributes:
        network: The transformers model, whose head is a `LossHead`; its parameter names are those
            of transformers, so that `network.save_pretrained` writes an ordinary checkpoint.
    """

    # `(B, T)` of the passes in which FlexAttention keeps documents apart; all others get a dense
    # mask. None: all do.
    block_shape: tuple[int, int] | None = None

    def __init__(self, network: Any, *, chunk_tokens: int, document_id: int | None = None) -> None:
        """Replace the head of a transformers causal model by one that returns the loss.

        Args:
            network: The transformers model.
            chunk_tokens: Tokens whose logits exist at once in the loss.
            document_id: Id that begins each document of a row, beyond which no token attends;
                None: every token attends to all before it.
        """
        super().__init__()
        self.document_id = document_id
        head = network.get_output_embeddings()
        network.set_output_embeddings(LossHead(head.weight, chunk_tokens=chunk_tokens))
        self.network = network

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of tokens `[B, T]` and those that follow them `[B, T]`.

        Labels of -100 are not counted.
        """
        loss: Tensor = self.network.get_output_embeddings()(self._hidden(input_ids), labels)
        return loss

    def logits(self, input_ids: Tensor) -> Tensor:
        """Return the predictions `[B, T, V]` for the token after each one."""
        logits: Tensor = self.network.get_output_embeddings()(self._hidden(input_ids))
        return logits

    def label_scores(
        self, input_ids: Tensor, labels: Tensor, *, vocabulary: int
    ) -> tuple[Tensor, Tensor]:
        """Return each row's sum of log-probabilities and its misses, as `label_scores` does.

        The head is called once, so that ranks may bring different numbers of labels.
        """
        head, hidden = self.network.get_output_embeddings(), self._hidden(input_ids)
        return label_scores(head, hidden, labels, vocabulary=vocabulary)

    def _hidden(self, input_ids: Tensor) -> Tensor:
        documents: dict[str, Any] = {}
        if self.document_id is not None:
            positions = document_positions(input_ids, document_id=self.document_id)
            documents = {"position_ids": positions}
            if input_ids.shape == self.block_shape:
                documents["document_blocks"] = document_blocks(positions)
            else:
                mask = document_mask(input_ids, document_id=self.document_id)
                documents["attention_mask"] = mask
        states: Tensor = self.network.base_model(
            input_ids=input_ids, use_cache=False, **documents
        ).last_hidden_state
        return states

    @property
    def block_class(self) -> type[nn.Module]:
        """The class of the repeated block: the unit of gathering, checkpointing, compiling."""
        body = self.network.base_model
        return type(body.h[0] if hasattr(body, "h") else body.layers[0])


def document_positions(input_ids: Tensor, *, document_id: int) -> Tensor:
    """Return each token's place in its own document, of the shape `[B, T]` of the ids.

    A document begins with `document_id`; what precedes the first one in a row is the rest of a
    document that began earlier, and counts from 0 as well.
    """
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    begins = torch.where(input_ids == document_id, places, 0).cummax(dim=1).values
    return places - begins


def untrained_loss(*, rows: int, width: int, initializer_range: float) -> float:
    """Return the loss that a right initialisation gives on random tokens, in nats.

    The final norm gives hidden states of D elements with unit variance and the head's weights are
    drawn from N(0, s^2): logits are N(0, D s^2), so that ln of their mean exponential, and with it
    the loss, is ln(V) + D s^2 / 2. At D 1536 and s 0.02 that is 0.31 above ln(V).

    `rows` are those of the embedding, padding included.
    """
    return math.log(rows) + min(width * initializer_range**2 / 2, LARGEST_LOGIT_TERM)


def counted_parameters(model: nn.Module) -> int:
    """Count the distinct parameters of a model, tied ones once (whole sizes under ZeRO-3 too)."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in set(model.parameters()))
